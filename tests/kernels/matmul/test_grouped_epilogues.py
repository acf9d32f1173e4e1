"""Epilogues of grouped products, besides bias and activation: residual, alpha and beta, 8-bit factors with scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import grouped_matmul
from weft.mesh import Layout
from weft.reshard import distribute, layout_of, to_global

from tests.kernels.cases import TWO
from tests.support.pool import Pool

from .cases import ACTIVATIONS, assert_as_good_as_eager, expected, normal
from .test_gradients import gradients, kept
from .test_grouped import ends
from .test_tiles import WAYS

SIZES, N, K, M = [5, 0, 20, 1], 28, 16, 24  # two rows are of no group
RESIDUALS = {"whole": (N, M), "row": (M,), "column": (N, 1), "number": ()}
EIGHT = torch.float8_e4m3fn
SCALES = {"numbers": ((), ()), "groups": ((N,), (4,)), "columns": ((N,), (4, M)), "none": None}


def one_by_one(
    a: Tensor, b: Tensor, bias: Tensor, residual: Tensor, activation: str | None, alpha: float, beta: float
) -> Tensor:
    """The truth: a product for each group, with the group's part of the epilogue."""
    parts = (each.split([*SIZES, N - sum(SIZES)]) for each in (a, residual.expand(N, M)))
    found = [
        expected(rows, matrix, row, activation, added, alpha, beta)
        for rows, added, matrix, row in zip(*parts, b, bias, strict=False)
    ]
    return torch.cat([*found, a.new_zeros(N - sum(SIZES), M)])


def operands(residual: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    shapes = ((N, K), (4, K, M), (4, M), RESIDUALS[residual])
    return [normal(*shape, dtype=dtype, seed=i).to(device) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_residual_and_two_factors(residual: str, activation: str | None, dtype: torch.dtype, device: str) -> None:
    tensors = operands(residual, dtype, device)
    wide = [each.double() for each in tensors]

    def grouped(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        given: dict[str, Any] = {"bias": bias, "activation": activation, "residual": residual}
        return grouped_matmul(a, b, ends(SIZES, device), **given, alpha=0.5, beta=-2.0)

    def eager(*given: Tensor) -> Tensor:
        return one_by_one(*given, activation, 0.5, -2.0)

    assert_as_good_as_eager(grouped(*tensors), eager(*tensors), eager(*wide))
    for found, other, truth in zip(
        *(gradients(grouped, *tensors), gradients(eager, *tensors)), gradients(eager, *wide), strict=True
    ):
        assert_as_good_as_eager(found, other, truth)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_gradients_by_finite_differences(residual: str) -> None:
    tensors = [each.requires_grad_() for each in operands(residual, torch.float64, "cpu")]

    def run(a: Tensor, b: Tensor, bias: Tensor, added: Tensor) -> Tensor:
        given: dict[str, Any] = {"bias": bias, "activation": "silu", "residual": added}
        return grouped_matmul(a, b, ends(SIZES), **given, alpha=0.5, beta=2.0)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


def test_no_group_adds_no_residual(device: str) -> None:
    a, b = normal(4, 3, dtype=torch.float32).to(device), normal(0, 3, 5, dtype=torch.float32).to(device)
    residual = torch.ones(4, 5, device=device, requires_grad=True)
    found = grouped_matmul(a, b, ends([], device), residual=residual)
    assert not found.any()
    found.sum().backward()
    assert residual.grad is not None and not residual.grad.any()


@pytest.mark.parametrize(("activation", "outputs"), [("relu", 1), ("silu", 1), (None, 0)], ids=str)
def test_beside_a_residual_what_the_activation_is_applied_to_is_kept(
    activation: str | None, outputs: int, device: str
) -> None:
    """With a residual the output does not tell relu's mask. Of the residual its shape is kept, as one number."""
    a, b, _, residual = operands("whole", torch.float32, device)
    offsets = ends(SIZES, device)
    tensors = [each.requires_grad_() for each in (a, b, residual)]

    def run(a: Tensor, b: Tensor, residual: Tensor, offsets: Tensor) -> Tensor:
        return grouped_matmul(a, b, offsets, residual=residual, activation=activation)

    assert kept(run, *tensors, offsets) == outputs * N * M + 1


@pytest.mark.parametrize("dtypes", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn")], ids="-".join)
@pytest.mark.parametrize("scales", SCALES)
def test_eight_bits_with_scales(scales: str, dtypes: tuple[str, str], device: str) -> None:
    a, b = (
        normal(*shape).to(getattr(torch, f"float8_{name}"))
        for name, shape in zip(dtypes, ((N, K), (4, K, M)), strict=True)
    )
    shapes = SCALES[scales]
    of_a, of_b = (
        (None, None) if shapes is None else [normal(*shape, dtype=torch.float32, seed=1).to(device) for shape in shapes]
    )
    bias, residual = (normal(*shape, dtype=torch.bfloat16).to(device) for shape in ((4, M), (N, M)))
    more: dict[str, Any] = {"activation": "silu", "a_scale": of_a, "b_scale": of_b, "alpha": 0.5, "beta": 2.0}
    found = grouped_matmul(a.to(device), b.to(device), ends(SIZES, device), bias=bias, residual=residual, **more)
    wide = a.double() * (1.0 if of_a is None else of_a.double().cpu().reshape(-1, 1))
    matrices = b.double() * (1.0 if of_b is None else of_b.double().cpu().reshape(-1, 1, M if of_b.ndim == 2 else 1))
    truth = one_by_one(wide, matrices, bias.double().cpu(), residual.double().cpu(), "silu", 0.5, 2.0)
    assert found.dtype == torch.bfloat16
    assert_as_good_as_eager(found.cpu(), truth.bfloat16(), truth)


def test_a_bias_of_8_bit_factors_has_its_gradient_in_full(device: str) -> None:
    a, b = normal(N, K).to(EIGHT).to(device), normal(4, K, M).to(EIGHT).to(device)
    bias = normal(4, M, dtype=torch.bfloat16).to(device).requires_grad_()
    upstream = normal(N, M, dtype=torch.bfloat16).to(device)
    grouped_matmul(a, b, ends(SIZES, device), bias=bias).backward(upstream)
    parts = upstream.double().cpu().split([*SIZES, N - sum(SIZES)])[:-1]
    truth = torch.stack([part.sum(0) for part in parts])
    assert bias.grad is not None
    assert_as_good_as_eager(bias.grad.cpu(), truth.bfloat16(), truth)


@pytest.mark.parametrize("way", ["descriptors", "pointers", "in-parts"])
def test_each_way_to_cut_a_product(interpreted: None, way: str) -> None:
    from weft.kernels.grouped_matmul import launch

    a, b, bias, residual = operands("whole", torch.bfloat16, "cpu")
    out, z = torch.zeros(N, M, dtype=torch.bfloat16), torch.zeros(N, M, dtype=torch.bfloat16)
    of = (a, b, ends(SIZES), bias, residual, None, None)
    launch.forward(*of, out, z, "silu", 0.5, 2.0, configuration=WAYS[way])
    given = (a, b, bias, residual)
    wide = [each.double() for each in given]
    assert_as_good_as_eager(out, one_by_one(*given, "silu", 0.5, 2.0), one_by_one(*wide, "silu", 0.5, 2.0))
    assert_as_good_as_eager(z, one_by_one(*given, None, 0.5, 0.0), one_by_one(*wide, None, 0.5, 0.0))


A, B = normal(N, K, dtype=torch.float32), normal(4, K, M, dtype=torch.float32)
EIGHTS = A.to(EIGHT), B.to(EIGHT)


@pytest.mark.parametrize(
    ("a", "b", "more", "told"),
    [
        pytest.param(A, B, {"residual": A}, r"\(28, 16\) does not broadcast to the output, \(28, 24\)", id="residual"),
        pytest.param(A, B.to("meta"), {}, "are on cpu and meta; move them to one device", id="devices"),
        pytest.param(A, EIGHTS[1], {}, "cannot be multiplied; cast", id="eight-and-more-bits"),
        pytest.param(
            A, B, {"a_scale": torch.ones(())}, "of a factor of torch.float32; for an 8-bit factor", id="scale"
        ),
        pytest.param(
            *EIGHTS,
            {"a_scale": torch.ones(4)},
            r"a_scale is .*\(4,\), .* give float32 of shape \(\) or \(28,\)",
            id="rows",
        ),
        pytest.param(
            *EIGHTS,
            {"b_scale": torch.ones(M)},
            r"\(\) or \(4,\) or \(4, 24\): one number, or one for each group",
            id="groups",
        ),
        pytest.param(*EIGHTS, {"b_scale": torch.ones(4).double()}, "b_scale is torch.float64", id="scale-dtype"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_each_other_are_named(a: Tensor, b: Tensor, more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        grouped_matmul(a, b, ends(SIZES), **more)


def test_a_sum_in_place_is_of_16_bits_at_least_and_of_nothing_more() -> None:
    total, grad = torch.zeros(4, K, M), normal(N, M, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"accumulate_into takes factors of 16 bits at least, got torch\.float8"):
        grouped_matmul(EIGHTS[0].mT, grad.to(EIGHT), ends(SIZES), accumulate_into=total)
    for more in ({"alpha": 2.0}, {"residual": grad}, {"a_scale": torch.ones(())}):
        with pytest.raises(ValueError, match="there is no bias, residual, scale, activation, alpha"):
            grouped_matmul(A.mT, grad, ends(SIZES), accumulate_into=total, **more)


OF_B = normal(4, M, dtype=torch.float32)


def by_experts(cut: str) -> tuple[str, Tensor]:
    """The groups, or the columns of each, over two ranks."""
    layouts = {"groups": ("tp: S(0)", "tp: S(0)"), "columns": ("tp: S(2)", "tp: S(1)")}[cut]
    b, of_b = (distribute(each, Layout(TWO, of)) for each, of in zip((EIGHTS[1], OF_B), layouts, strict=True))
    a, of_a = (distribute(each, Layout(TWO)) for each in (EIGHTS[0], torch.full((N,), 0.5)))
    found = grouped_matmul(a, b, ends(SIZES), a_scale=of_a, b_scale=of_b)
    return str(layout_of(found)), to_global(found)


@pytest.mark.parametrize(("cut", "lies"), [("groups", "tp: P(sum)"), ("columns", "tp: S(1)")])
def test_scales_are_cut_as_the_matrices_are(pool: Pool, cut: str, lies: str) -> None:
    whole = grouped_matmul(*EIGHTS, ends(SIZES), a_scale=torch.full((N,), 0.5), b_scale=OF_B)
    for layout, found in pool.run(by_experts, cut, ranks=2):
        assert layout == lies
        assert torch.equal(found, whole)
