"""rms_norm on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..attention.heads import check_heads
from ..op import Op
from ..sharded import Shapes, Sharding, apply, autocasts, independent
from . import reference


@autocasts("rms_norm")
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, head_dim: int | None = None) -> Tensor:
    """`x / sqrt(mean(x**2) + eps) * weight`, the mean over the last dim (Zhang & Sennrich, 2019).

    x: [..., H]. weight: [H], or None for a norm without one. Returns [..., H].
    head_dim: D for a norm of each head of x [..., heads * D] by itself, with a weight [D] for all of them.
    Layouts: any that leaves the last dim whole, or each head where there is a `head_dim`; the output lies as `x`. The gradient
    of a replicated weight is Partial(sum) on each axis that `x` is sharded over. Communication: none.
    Raises LayoutError where the last dim, or a head, is cut, or `x` is Partial.
    """
    if head_dim is not None and (x.ndim < 1 or head_dim < 1 or x.shape[-1] % head_dim):
        raise ValueError(f"rms_norm takes x [..., heads * {head_dim}], got {tuple(x.shape)}")
    size = x.shape[-1:] if head_dim is None else (head_dim,)
    if x.ndim < 1 or (weight is not None and weight.shape != size):
        row, one = ("H", "H") if head_dim is None else (f"heads * {head_dim}", str(head_dim))
        shape = None if weight is None else tuple(weight.shape)
        raise ValueError(f"rms_norm takes x [..., {row}] and weight [{one}], got {tuple(x.shape)} and {shape}")
    return apply(RMS_NORM, x, weight, eps=eps, head_dim=head_dim)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, weight = layouts
    shape, _ = shapes
    assert x is not None and shape is not None, "x is given"
    head_dim = options["head_dim"]
    output = infer.whole("rms_norm", "x", x, len(shape) - 1 if head_dim is None else ())
    if head_dim is not None:
        check_heads("rms_norm", x, shape, head_dim)
    if weight is not None:
        infer.whole("rms_norm", "the weight", weight, 0)
    return Sharding(output, shape, independent(output, layouts))


RMS_NORM = Op("rms_norm", reference.forward, reference.backward, _rule, inference=reference.inference)
