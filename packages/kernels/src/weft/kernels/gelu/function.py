"""GELU of local tensors: x * Phi(x), where Phi is the normal distribution function (Hendrycks and Gimpel 2016).

`forward`, `recompute` and `backward` choose the code by `use_triton`. The Triton kernels of `swiglu` compute on a GPU
and in Triton's interpreter. Plain torch (`plain_forward`, `plain_backward`) computes on a CPU and in float64, and
defines the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dispatch.backend import runs_natively, use_triton
from ..dispatch.op import Tensors
from ..swiglu.function import kernel_backward, kernel_forward


def forward(x: Tensor, *, approximate: str = "none") -> tuple[Tensor, Tensors]:
    """gelu(x), and the saved tensors: x."""
    y = kernel_forward(x, None, approximate) if use_triton(x) else plain_forward(x, approximate=approximate)
    return y, (x,)


def native(x: Tensor, approximate: str) -> Tensor | None:
    """gelu(x) by torch's function with torch's own gradient, where `runs_natively` allows; None elsewhere."""
    return plain_forward(x, approximate=approximate) if runs_natively(x) else None


def recompute(saved: Tensors, *, approximate: str = "none") -> Tensor:
    """Recomputes the output of `forward` from its saved tensors."""
    (x,) = saved
    assert x is not None, "forward saves x"
    return forward(x, approximate=approximate)[0]


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, approximate: str = "none") -> Tensors:
    """The gradient of x, as in `plain_backward`."""
    (x,) = saved
    assert x is not None, "forward saves x"
    if use_triton(x):
        return kernel_backward(grad, x, None, needed, approximate)
    return (plain_backward(grad, x, approximate=approximate) if needed[0] else None,)


def plain_forward(x: Tensor, *, approximate: str = "none") -> Tensor:
    """gelu(x), of x's shape. approximate: "none", or "tanh" for the form in section 2 of the paper, as GPT-2 uses."""
    return F.gelu(x, approximate=approximate)


def plain_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """dx = grad * (Phi(x) + x * phi(x)), or the tanh form's derivative; one pass, by aten's gelu_backward."""
    dx: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    return dx
