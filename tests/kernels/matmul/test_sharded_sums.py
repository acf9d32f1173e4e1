"""accumulate_into on DTensors: weight gradients of two microbatches added up, with sharded layers and sharded rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weft.kernels import grouped_matmul, matmul
from weft.mesh import Layout
from weft.reshard import distribute, layout_of, to_global

from tests.kernels.cases import TWO
from tests.support.pool import Pool

from .cases import assert_as_good_as_eager, normal
from .test_grouped import ends

ROWS, M, K = 12, 6, 8
# Layouts of the gradient [M, ROWS], of the input [ROWS, K], and of the sum.
CASES = {
    "column": ("tp: S(0)", "", "tp: S(0)"),
    "row": ("", "tp: S(1)", "tp: S(1)"),
    "dp": ("tp: S(1)", "tp: S(0)", "tp: P(sum)"),
}
# Of groups: of the input [K, ROWS], of the gradient [ROWS, M], and of the sum [G, K, M].
GROUPED = {
    "experts": ("", "", "tp: S(0)"),
    "column": ("", "tp: S(1)", "tp: S(2)"),
    "row": ("tp: S(0)", "", "tp: S(1)"),
}
SIZES = [5, 0, 6]


def microbatches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    return [(normal(M, ROWS, dtype=dtype, seed=i), normal(ROWS, K, dtype=dtype, seed=i)) for i in range(2)]


def added(case: str, dtype: torch.dtype) -> tuple[str, Tensor]:
    of_grad, of_input, of_sum = CASES[case]
    total = distribute(torch.ones(M, K), Layout(TWO, of_sum))
    for grad, x in microbatches(dtype):
        factors = distribute(grad, Layout(TWO, of_grad)), distribute(x, Layout(TWO, of_input))
        assert matmul(*factors, accumulate_into=total) is total
    return str(layout_of(total)), to_global(total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_weights_gradient_adds_up_where_it_lies(pool: Pool, case: str, dtype: torch.dtype) -> None:
    truth = 1 + sum(grad.double() @ x.double() for grad, x in microbatches(dtype))
    assert isinstance(truth, Tensor)
    for layout, found in pool.run(added, case, dtype, ranks=2):
        assert layout == CASES[case][2]
        assert found.dtype == torch.float32
        assert_as_good_as_eager(found, truth.float(), truth)


def added_by_group(case: str) -> tuple[str, Tensor]:
    of_input, of_grad, of_sum = GROUPED[case]
    total = distribute(torch.ones(len(SIZES), K, M), Layout(TWO, of_sum))
    for grad, x in microbatches(torch.bfloat16):
        factors = (
            distribute(x.mT.contiguous(), Layout(TWO, of_input)),
            distribute(grad.mT.contiguous(), Layout(TWO, of_grad)),
        )
        assert grouped_matmul(*factors, ends(SIZES), accumulate_into=total) is total
    return str(layout_of(total)), to_global(total)


@pytest.mark.parametrize("case", GROUPED)
def test_gradients_of_experts_add_up_where_they_lie(pool: Pool, case: str) -> None:
    truth = torch.ones(len(SIZES), K, M, dtype=torch.float64)
    for grad, x in microbatches(torch.bfloat16):
        parts = (each.double().split([*SIZES, ROWS - sum(SIZES)]) for each in (x, grad.mT))
        truth += torch.stack([rows.mT @ of_grad for rows, of_grad in zip(*parts, strict=True)][:-1])
    for layout, found in pool.run(added_by_group, case, ranks=2):
        assert layout == GROUPED[case][2]
        assert_as_good_as_eager(found, truth.float(), truth)
