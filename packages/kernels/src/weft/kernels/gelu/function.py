"""gelu of local tensors, forward and backward, by the kernels of gates or in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..backend import on_cpu, use_triton
from ..op import Tensors
from ..swiglu.function import activated, gradients
from . import reference


def forward(x: Tensor, *, approximate: str = "none") -> tuple[Tensor, Tensors]:
    """See `reference.forward`."""
    y = activated(x, None, approximate) if use_triton(x) else reference.forward(x, approximate=approximate)
    return y, (x,)


def native(x: Tensor, *, approximate: str = "none") -> tuple[Tensor, Tensors] | None:
    """`forward` by torch's own function, on a CPU."""
    return (reference.forward(x, approximate=approximate), (x,)) if on_cpu(x) and not use_triton(x) else None


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
