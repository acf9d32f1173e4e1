"""rope on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..attention.heads import check_heads
from ..op import Op
from ..sharded import Shapes, Sharding, apply, independent
from . import reference


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021): the pairs (i, i + D/2) of every head turned by their angle.

    x: [..., T, heads * D]. cos, sin: [T, D / 2], of float32. Returns the shape of `x`.
    Layouts: any that leaves the tokens and each head whole; the output lies as `x`. Communication: none.
    Raises LayoutError where tokens are sharded, a head is cut, or `x` is Partial.
    """
    head_dim = 2 * cos.shape[-1]
    if cos.ndim != 2 or cos.shape != sin.shape or x.ndim < 2 or x.shape[-2] != cos.shape[0] or x.shape[-1] % head_dim:
        raise ValueError(
            f"rope takes x [..., T, heads * D] and cos, sin [T, D / 2], got {tuple(x.shape)}, {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}"
        )
    return apply(ROPE, x, cos, sin)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, cos, sin = layouts
    shape, table, _ = shapes
    assert x is not None and cos is not None and sin is not None and shape and table, "all are given"
    output = infer.whole("rope", "x", x, len(shape) - 2)
    for name, layout in (("cos", cos), ("sin", sin)):
        infer.whole("rope", name, layout, (0, 1))
    check_heads("rope", x, shape, 2 * table[1])
    return Sharding(output, shape, independent(output, layouts))


ROPE = Op("rope", reference.forward, reference.backward, _rule)
