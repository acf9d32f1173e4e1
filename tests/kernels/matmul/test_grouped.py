"""grouped_matmul against one product a group in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import grouped_matmul
from weft.mesh import Layout, LayoutError
from weft.reshard import distribute

from tests.kernels.cases import TWO
from tests.kernels.reads import NoReads
from tests.support.pool import Pool

from .cases import assert_as_good_as_eager, normal
from .test_gradients import gradients


def eager(a: Tensor, b: Tensor, sizes: list[int]) -> Tensor:
    parts = a.split([*sizes, len(a) - sum(sizes)])
    products = [part @ each for part, each in zip(parts, b, strict=False)]
    return torch.cat([*products, parts[-1].new_zeros(len(parts[-1]), b.shape[-1])])


def ends(sizes: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "rows", "K", "M"),
    [
        pytest.param([5, 0, 20, 1], 26, 24, 40, id="uneven"),
        pytest.param([3, 2], 9, 7, 5, id="rows-behind-the-last"),
        pytest.param([0, 0], 0, 4, 4, id="no-rows"),
        pytest.param([0, 0, 4], 4, 3, 33, id="empty-first"),
        pytest.param([4], 4, 0, 3, id="nothing-to-sum"),
    ],
)
def test_values_and_gradients(sizes: list[int], rows: int, K: int, M: int, dtype: torch.dtype, device: str) -> None:
    tensors = [normal(*shape, dtype=dtype).to(device) for shape in ((rows, K), (len(sizes), K, M))]
    wide = [each.double() for each in tensors]

    def grouped(a: Tensor, b: Tensor) -> Tensor:
        return grouped_matmul(a, b, ends(sizes, device))

    def one_by_one(a: Tensor, b: Tensor) -> Tensor:
        return eager(a, b, sizes)

    assert_as_good_as_eager(grouped(*tensors), one_by_one(*tensors), one_by_one(*wide))
    for found, other, truth in zip(
        *(gradients(grouped, *tensors), gradients(one_by_one, *tensors)), gradients(one_by_one, *wide), strict=True
    ):
        assert_as_good_as_eager(found, other, truth)


def test_rows_of_no_group_are_zeros(device: str) -> None:
    found = grouped_matmul(torch.ones(4, 3, device=device), torch.ones(0, 3, 5, device=device), ends([], device))
    assert torch.equal(found.cpu(), torch.zeros(4, 5))


def test_gradients_by_finite_differences() -> None:
    a, b = normal(9, 4).requires_grad_(), normal(3, 4, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: grouped_matmul(a, b, ends([2, 0, 6])), (a, b))


def test_transposed_matrices_are_not_copied(device: str) -> None:
    a, b = normal(9, 24, dtype=torch.float32).to(device), normal(2, 40, 24, dtype=torch.float32).to(device).mT
    truth = eager(a.double(), b.double(), [4, 5])
    assert_as_good_as_eager(grouped_matmul(a, b, ends([4, 5], device)), eager(a, b, [4, 5]), truth)


def test_the_host_reads_no_offset(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the kernels find the groups themselves."""
    from weft.kernels.grouped_matmul import kernel, sharded

    class Launched:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **constexprs: None

    monkeypatch.setattr(sharded, "can_read", lambda tensor: False)
    monkeypatch.setattr(kernel, "rows_by_group", Launched())
    monkeypatch.setattr(kernel, "weights_by_group", Launched())
    a, b = (normal(*shape, dtype=torch.float32).requires_grad_() for shape in ((9, 4), (3, 4, 5)))
    offsets = ends([2, 0, 6])
    with NoReads():
        grouped_matmul(a, b, offsets).sum().backward()


def test_it_is_one_node_of_a_compiled_graph() -> None:
    torch._dynamo.reset()
    tensors = [normal(9, 4), normal(3, 4, 5)]
    compiled = torch.compile(
        lambda a, b: grouped_matmul(a, b, ends([2, 0, 6])) * 2, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(
        gradients(compiled, *tensors), gradients(lambda a, b: eager(a, b, [2, 0, 6]) * 2, *tensors)
    )


@pytest.mark.parametrize(
    ("a", "b", "offsets", "told"),
    [
        pytest.param((9, 4), (3, 5, 6), [2, 2, 9], r"got \(9, 4\), \(3, 5, 6\) and \(3,\)", id="inner-sizes"),
        pytest.param((9, 4), (3, 4, 6), [2, 9], r"and offsets \[G\], got", id="groups"),
        pytest.param((9, 4), (2, 4, 6), [5, 3], r"end at \[5, 3\], of 9 rows; give offsets that rise", id="falling"),
        pytest.param((9, 4), (2, 4, 6), [5, 12], r"end at \[5, 12\], of 9 rows", id="behind-the-rows"),
    ],
)
def test_what_does_not_go_together_is_named(
    a: tuple[int, ...], b: tuple[int, ...], offsets: list[int], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        grouped_matmul(normal(*a), normal(*b), torch.tensor(offsets, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"torch.int64 and torch.float64; cast them"):
        grouped_matmul(normal(9, 4), normal(1, 4, 5), torch.tensor([9]))


def cut_rows() -> str:
    a, b = distribute(normal(8, 4), Layout(TWO, "tp: S(0)")), distribute(normal(2, 4, 5), Layout(TWO))
    with pytest.raises(LayoutError) as caught:
        grouped_matmul(a, b, ends([3, 5]))
    return str(caught.value)


def test_rows_that_are_cut_are_refused(pool: Pool) -> None:
    for message in pool.run(cut_rows, ranks=2):
        assert "the rows of a are cut over 'tp', and the offsets count all rows; reshard a to (tp: R)" in message
