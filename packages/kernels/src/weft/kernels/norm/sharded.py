"""rms_norm on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..op import Op
from ..sharded import Shapes, Sharding, apply, autocasts, independent
from . import reference


@autocasts("rms_norm")
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(mean(x**2) + eps) * weight`, the mean over the last dim (Zhang & Sennrich, 2019).

    x: [..., H]. weight: [H], or None for a norm without one. Returns [..., H].
    Layouts: any that leaves the last dim whole; the output lies as `x`. Communication: none.
    Raises LayoutError where the last dim is sharded or `x` is Partial.
    """
    if x.ndim < 1 or (weight is not None and weight.shape != x.shape[-1:]):
        raise ValueError(
            f"rms_norm takes x [..., H] and weight [H], got {tuple(x.shape)} and {None if weight is None else tuple(weight.shape)}"
        )
    return apply(RMS_NORM, x, weight, eps=eps)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, weight = layouts
    shape, _ = shapes
    assert x is not None and shape is not None, "x is given"
    output = infer.whole("rms_norm", "x", x, len(shape) - 1)
    if weight is not None:
        infer.whole("rms_norm", "the weight", weight, 0)
    return Sharding(output, shape, independent(output, layouts))


RMS_NORM = Op("rms_norm", reference.forward, reference.backward, _rule)
