"""Operands that do not fit together are refused, with the values and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from weft.kernels import linear, matmul
from weft.mesh import Layout, LayoutError
from weft.reshard import distribute

from tests.kernels.cases import TWO
from tests.support.pool import Pool

from .cases import normal

A, B = normal(4, 6, dtype=torch.float32), normal(6, 8, dtype=torch.float32)
EIGHT = A.to(torch.float8_e4m3fn), B.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("a", "b", "options", "told"),
    [
        pytest.param(A, A, {}, r"\(4, 6\) and \(4, 6\).*transpose a factor with .mT", id="inner-sizes"),
        pytest.param(A[0], B, {}, r"takes a \[..., M, K\].*got \(6,\)", id="one-dim"),
        pytest.param(A.expand(2, 4, 6), B.expand(3, 6, 8), {}, "the same leading dims", id="leading-dims"),
        pytest.param(A, B.bfloat16(), {}, "float32 and torch.bfloat16 cannot be multiplied; cast", id="dtypes"),
        pytest.param(A.int(), B.int(), {}, "int32 cannot be multiplied; cast", id="integers"),
        pytest.param(A, EIGHT[1], {}, "cannot be multiplied; cast", id="eight-and-more-bits"),
        pytest.param(A, B.to("meta"), {}, "are on cpu and meta; move them to one device", id="devices"),
        pytest.param(A, B, {"bias": A[0]}, r"a bias of shape \(8,\), got \(6,\)", id="bias"),
        pytest.param(A, B, {"residual": A}, r"\(4, 6\) does not broadcast to the output, \(4, 8\)", id="residual"),
        pytest.param(A, B, {"activation": "tanh"}, "activation is 'tanh'; give one of 'gelu', 'gelu_tanh'", id="name"),
        pytest.param(A, B, {"out_dtype": torch.int32}, "out_dtype is torch.int32; give one of", id="out-dtype"),
        pytest.param(*EIGHT, {"a_scale": torch.ones(6)}, r"give float32 of shape \(\) or \(4,\)", id="scale-shape"),
        pytest.param(*EIGHT, {"b_scale": torch.ones(8).double()}, r"b_scale is torch.float64", id="scale-dtype"),
        pytest.param(A, B, {"a_scale": torch.ones(4)}, "of a factor of torch.float32; for an 8-bit factor", id="scale"),
        pytest.param(A, B, {"accumulate_into": A}, r"give torch.float32 of shape \(4, 8\)", id="sum-shape"),
        pytest.param(
            A.bfloat16(),
            B.bfloat16(),
            {"accumulate_into": torch.zeros(4, 8).half()},
            "give torch.float32",
            id="sum-dtype",
        ),
        pytest.param(
            *EIGHT, {"accumulate_into": torch.zeros(4, 8)}, "takes factors of 16 bits at least", id="sum-of-eight-bits"
        ),
        pytest.param(
            A, B, {"accumulate_into": torch.zeros(4, 8, device="meta")}, "are on cpu and meta", id="sum-elsewhere"
        ),
        pytest.param(
            A,
            B,
            {"accumulate_into": torch.zeros(4, 8), "activation": "relu"},
            "beside accumulate_into",
            id="sum-of-relu",
        ),
    ],
)  # fmt: skip
def test_matmul_names_the_values_and_the_remedy(a: Any, b: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        matmul(a, b, **options)


def test_a_sum_in_place_records_no_gradient() -> None:
    with pytest.raises(ValueError, match=r"records no gradient; call it under torch.no_grad\(\)"):
        matmul(A.clone().requires_grad_(), B, accumulate_into=torch.zeros(4, 8))


def test_linear_names_its_activations() -> None:
    with pytest.raises(ValueError, match="linear: activation is 'elu'; give one of 'gelu'"):
        linear(A, B.mT, activation="elu")


def of_addends() -> list[str]:
    a, b = distribute(A, Layout(TWO, "tp: S(1)")), distribute(B, Layout(TWO, "tp: S(0)"))
    residual = distribute(torch.ones(4, 8), Layout(TWO, "tp: S(0)"))
    messages = []
    for call in (
        lambda: matmul(a, b, activation="gelu"),
        lambda: linear(a, distribute(B.mT.contiguous(), Layout(TWO, "tp: S(1)")), activation="silu"),
        lambda: matmul(a, b, residual=residual),
        lambda: matmul(a, distribute(B, Layout(TWO))),
        lambda: linear(distribute(A, Layout(TWO)), distribute(B.mT.contiguous(), Layout(TWO, "tp: S(1)"))),
        lambda: matmul(a, b, accumulate_into=distribute(torch.zeros(4, 8), Layout(TWO))),
    ):
        with pytest.raises(LayoutError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


# The axis, both layouts, the sharded dims of both operands, and the reshard to insert.
LEFT = (
    "matmul: on axis 'tp' operands are S(1), R: the axis shards dim 1 of a, but not dim 0 of b; reshard b to (tp: S(0))"
)
RIGHT = (
    "linear: on axis 'tp' operands are R, S(1): "
    "the axis shards dim 1 of weight, but not dim 1 of input; reshard input to (tp: S(1))"
)


def test_layouts_that_do_not_go_together_name_the_reshard(pool: Pool) -> None:
    for gelu, silu, residual, left, right, total in pool.run(of_addends, ranks=2):
        assert (
            "matmul: the output is (tp: P(sum)), and gelu needs the sum" in gelu
            and "reshard the output to (tp: R)" in gelu
        )
        assert "linear: the output is (tp: P(sum)), and silu needs the sum" in silu
        assert "reshard the residual to (tp: R)" in residual
        assert left == LEFT
        assert right == RIGHT
        assert "reshard the sum to accumulate into to (tp: P(sum))" in total


@pytest.mark.parametrize(
    ("lying", "told"),
    [
        pytest.param("expanded", r"strides \(0, 1\): several elements share their memory", id="expanded"),
        pytest.param("rows", "no single stride reaches all rows; give it contiguous", id="rows"),
    ],
)
def test_a_sum_in_place_needs_room_of_its_own(lying: str, told: str, device: str) -> None:
    into = {"expanded": lambda x: x[:1, 0].expand(4, 8), "rows": lambda x: x.transpose(0, 1)}[lying](
        torch.zeros(4, 2, 8, device=device)
    )
    a = A if into.ndim == 2 else A.expand(2, 4, 6)
    with pytest.raises(ValueError, match=f"matmul: accumulate_into of shape .*{told}"):
        matmul(a.to(device), B.to(device), accumulate_into=into)
    assert not into.any()


@pytest.mark.parametrize("lying", ["apart", "transposed", "batches"])
def test_a_sum_in_place_may_have_strides(lying: str, device: str) -> None:
    room = {
        "apart": torch.zeros(4, 16)[:, ::2],
        "transposed": torch.zeros(8, 4).mT,
        "batches": torch.zeros(2, 4, 9)[..., :8],
    }
    into = room[lying].to(device)
    a = A if into.ndim == 2 else A.expand(2, 4, 6)
    assert matmul(a.to(device), B.to(device), accumulate_into=into) is into
    torch.testing.assert_close(into.cpu(), (a.double() @ B.double()).float())
