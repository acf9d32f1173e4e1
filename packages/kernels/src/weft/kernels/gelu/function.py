"""gelu of local tensors, forward and backward, by the kernels of gates or in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..backend import is_torchs, use_triton
from ..op import Tensors
from ..swiglu.function import activated, gradients
from . import reference


def forward(x: Tensor, *, approximate: str = "none") -> tuple[Tensor, Tensors]:
    """See `reference.forward`."""
    y = activated(x, None, approximate) if use_triton(x) else reference.forward(x, approximate=approximate)
    return y, (x,)


def native(x: Tensor, approximate: str) -> Tensor | None:
    """The output by torch's own function, which differentiates it; None where that is not for it."""
    return reference.forward(x, approximate=approximate) if is_torchs(x) else None


def again(saved: Tensors, *, approximate: str = "none") -> Tensor:
    """The output, from what `forward` saved."""
    (x,) = saved
    assert x is not None, "forward saves it"
    return forward(x, approximate=approximate)[0]


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, approximate: str = "none") -> Tensors:
    """See `reference.backward`."""
    (x,) = saved
    assert x is not None, "forward saves it"
    if use_triton(x):
        return gradients(grad, x, None, needed, approximate)
    return (reference.backward(grad, x, approximate=approximate) if needed[0] else None,)
