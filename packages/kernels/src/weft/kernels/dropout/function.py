"""dropout of local tensors, forward and backward: one function, for it is linear and its own transpose."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..backend import use_triton
from ..op import Tensors
from ..random.part import Part
from . import reference


def forward(x: Tensor, *, p: float, key: int, part: Part | None = None) -> tuple[Tensor, Tensors]:
    """The output, and nothing saved: backward draws the mask again.

    part: which elements of the global tensor x is; all of them without.
    """
    return _masked(x, p, key, part), ()


def backward(
    saved: Tensors, grad: Tensor, needed: Sequence[bool], *, p: float, key: int, part: Part | None = None
) -> Tensors:
    """The gradient, dropped and scaled as x was."""
    return (_masked(grad, p, key, part) if needed[0] else None,)


def _masked(x: Tensor, p: float, key: int, part: Part | None) -> Tensor:
    part = Part.of(x.shape) if part is None else part
    threshold = round(p * 2**32)  # exact: p * 2**32 only moves the exponent
    if threshold == 2**32:
        return x.new_zeros(x.shape)
    scale = 1 / (1 - p)
    if use_triton(x):
        from . import launch  # imports triton, which a CPU run may not have

        return launch.masked(x, part, key, threshold=threshold, scale=scale)
    return reference.masked(x, part, key, threshold=threshold, scale=scale)
