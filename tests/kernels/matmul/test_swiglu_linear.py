"""swiglu_linear against two products and a gate in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from weft.kernels import linear, swiglu_linear
from weft.kernels.dispatch import backend
from weft.kernels.launching.traffic import counted_traffic

from .cases import assert_as_good_as_eager, normal
from .test_gradients import gradients, kept


def eager(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(x @ gate.mT) * (x @ up.mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 9, 24, 40), (1, 1, 1, 1), (3, 5, 7, 3), (0, 2, 4, 4), (2, 2, 0, 5), (2, 3, 4, 0)], ids=str
)
def test_values_and_gradients(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    *lead, K, M = shape
    tensors = [
        normal(*sizes, dtype=dtype, seed=seed).to(device) for seed, sizes in enumerate(((*lead, K), (M, K), (M, K)))
    ]
    wide = [each.double() for each in tensors]
    assert_as_good_as_eager(swiglu_linear(*tensors), eager(*tensors), eager(*wide))
    for found, other, truth in zip(
        gradients(swiglu_linear, *tensors), gradients(eager, *tensors), gradients(eager, *wide), strict=True
    ):
        assert_as_good_as_eager(found, other, truth)


def test_gradients_by_finite_differences() -> None:
    tensors = [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(((2, 3, 4), (5, 4), (5, 4)))]
    assert torch.autograd.gradcheck(swiglu_linear, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_products_are_kept_and_on_a_cpu_in_32_bits_the_activation(
    dtype: torch.dtype, device: str, request: pytest.FixtureRequest
) -> None:
    x, gate, up = (normal(*shape, dtype=dtype).to(device).requires_grad_() for shape in ((6, 8), (10, 8), (10, 8)))
    has_room = request.node.callspec.params["device"] == "reference" and dtype == torch.float32
    assert kept(swiglu_linear, x, gate, up) == (3 if has_room else 2) * 60


def test_a_consumer_of_the_output_keeps_the_products_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are kept already: a feed-forward layer keeps its input and both, and makes the gate's output again."""
    monkeypatch.setattr(backend, "PLAIN", frozenset())
    monkeypatch.setattr(backend, "is_short_of_memory", lambda output: True)  # as a GPU is
    x, gate, up, down = (normal(*shape).requires_grad_() for shape in ((6, 8), (10, 8), (10, 8), (8, 10)))
    assert kept(lambda *t: linear(swiglu_linear(*t[:3]), t[3]), x, gate, up, down) == 2 * 60
    found = gradients(lambda *t: linear(swiglu_linear(*t[:3]), t[3]), x, gate, up, down)
    torch.testing.assert_close(found, gradients(lambda *t: eager(*t[:3]) @ t[3].mT, x, gate, up, down))


def test_the_input_is_read_once_for_both_products(interpreted: None) -> None:
    """A tile of 16 x 16 reads 16 rows of the input, and 16 of each weight."""
    M, N, K = 32, 64, 48
    x, gate, up = (normal(*shape, dtype=torch.float16) for shape in ((M, K), (N, K), (N, K)))
    with torch.no_grad(), counted_traffic() as traffic:
        swiglu_linear(x, gate, up)
    tiles = (M // 16) * (N // 16)
    assert traffic.loaded == tiles * 3 * 16 * K * 2
    assert traffic.stored == M * N * 2


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        pytest.param(
            ((4, 6), (8, 6), (8, 5)), r"two weights \[M, K\], got \(4, 6\), \(8, 6\) and \(8, 5\)", id="weights"
        ),
        pytest.param(((4, 5), (8, 6), (8, 6)), r"got \(4, 5\), \(8, 6\) and \(8, 6\)", id="inner-sizes"),
    ],
)
def test_sizes_that_differ_are_named(shapes: tuple[tuple[int, ...], ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        swiglu_linear(*(normal(*shape) for shape in shapes))
    with pytest.raises(ValueError, match="cannot be multiplied; cast one"):
        swiglu_linear(normal(4, 6), normal(8, 6).float(), normal(8, 6))
