"""GELU of local tensors, forward and backward, by the kernels of `swiglu` or in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..dispatch.backend import is_torchs, use_triton
from ..dispatch.op import Tensors
from ..swiglu.function import activated, gradients
from . import reference


def forward(x: Tensor, *, approximate: str = "none") -> tuple[Tensor, Tensors]:
    """gelu(x), and the saved tensors: x."""
    y = activated(x, None, approximate) if use_triton(x) else reference.forward(x, approximate=approximate)
    return y, (x,)


def native(x: Tensor, approximate: str) -> Tensor | None:
    """gelu(x) by torch's function with torch's own gradient, where `is_torchs` allows; None elsewhere."""
    return reference.forward(x, approximate=approximate) if is_torchs(x) else None


def again(saved: Tensors, *, approximate: str = "none") -> Tensor:
    """Recomputes the output of `forward` from its saved tensors."""
    (x,) = saved
    assert x is not None, "forward saves x"
    return forward(x, approximate=approximate)[0]


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, approximate: str = "none") -> Tensors:
    """The gradient of x, as in `reference.backward`."""
    (x,) = saved
    assert x is not None, "forward saves x"
    if use_triton(x):
        return gradients(grad, x, None, needed, approximate)
    return (reference.backward(grad, x, approximate=approximate) if needed[0] else None,)
