"""layer_norm on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..op import Op
from ..sharded import Shapes, Sharding, apply, autocasts, independent
from . import reference


@autocasts("layer_norm")
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """`(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`, over the last dim (Ba et al., 2016).

    x: [..., H]. weight, bias: [H], or None for a norm without. Returns [..., H], of the dtype of `x`.
    Layouts: any that leaves the last dim whole; the output lies as `x`. Communication: none.
    Raises LayoutError where the last dim is sharded or `x` is Partial.
    """
    for name, each in (("weight", weight), ("bias", bias)):
        if x.ndim < 1 or (each is not None and each.shape != x.shape[-1:]):
            shape = None if each is None else tuple(each.shape)
            raise ValueError(f"layer_norm takes x [..., H] and {name} [H], got {tuple(x.shape)} and {shape}")
    return apply(LAYER_NORM, x, weight, bias, eps=eps)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, weight, bias = layouts
    shape = shapes[0]
    assert x is not None and shape is not None, "x is given"
    output = infer.whole("layer_norm", "x", x, len(shape) - 1)
    for name, each in (("the weight", weight), ("the bias", bias)):
        if each is not None:
            infer.whole("layer_norm", name, each, 0)
    return Sharding(output, shape, independent(output, layouts))


LAYER_NORM = Op("layer_norm", reference.forward, reference.backward, _rule)
