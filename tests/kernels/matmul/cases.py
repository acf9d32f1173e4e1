"""Factors, and products in float64 that share no code with the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from weft.kernels.matmul import reference


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _scales_rows() -> bool:
    x, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16)
    try:
        reference.scaled_product(x, x.mT, scale, scale, torch.bfloat16)
    except RuntimeError:
        return False
    return True


# torch 2.11's GEMM of 8-bit factors takes one number on a CPU; on a GPU, where Weft calls it, each torch takes rows.
needs_scaled_rows = pytest.mark.skipif(not _scales_rows(), reason="this torch scales no rows of 8-bit factors on a CPU")


# Written out, not torch's own.
ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda z: z,
    "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "relu": lambda z: z.clamp(min=0),
    "relu2": lambda z: z.clamp(min=0) ** 2,
}


def expected(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """The result in the operands' dtype: the truth for float64, eager torch's result for narrower dtypes."""
    z = torch.matmul(a, b) * alpha
    out = ACTIVATIONS[activation](z if bias is None else z + bias)
    return out if residual is None else out + beta * residual


def largest(error: Tensor) -> float:
    return float(error.abs().max()) if error.numel() else 0.0


def assert_as_good_as_eager(found: Tensor, eager: Tensor, truth: Tensor) -> None:
    """Asserts an error of at most twice eager torch's in the same dtype."""
    assert found.shape == truth.shape
    allowed = 2 * largest(eager.double() - truth) + 4 * torch.finfo(eager.dtype).eps * largest(truth)
    assert largest(found.double() - truth) <= allowed
