"""attention on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..op import Op
from ..sharded import Shapes, Sharding, apply, independent
from . import reference
from .heads import check_heads


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, head_dim: int, causal: bool = True, scale: float | None = None
) -> Tensor:
    """Scaled dot-product attention (Vaswani et al., 2017), with grouped queries where there are fewer key heads.

    query: [..., T, heads * D]. key, value: [..., S, kv_heads * D]. Returns the shape of `query`. `causal` aligns the
    last query with the last key. scale: 1 / sqrt(D) by default.
    Layouts: one for all three, with tokens and each head whole; the output lies as `query`. Communication: none.
    Raises LayoutError for any other layouts.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim < 2 or tensor.shape[-1] % head_dim or tensor.shape[:-2] != query.shape[:-2]:
            raise ValueError(
                f"attention takes {name} [..., tokens, heads * {head_dim}], got {tuple(tensor.shape)} beside a query "
                f"of {tuple(query.shape)}"
            )
    if key.shape != value.shape or not key.shape[-1] or query.shape[-1] % key.shape[-1]:
        raise ValueError(
            f"attention takes key and value of one shape whose heads divide the query's, got {tuple(query.shape)}, "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )
    return apply(ATTENTION, query, key, value, head_dim=head_dim, causal=causal, scale=scale)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    query, key, value = layouts
    assert query is not None and key is not None and value is not None and shapes[0] is not None, "all are given"
    output = infer.elementwise("attention", False, query, key, value)
    infer.whole("attention", "the query", query, len(shapes[0]) - 2)
    for layout, shape in zip((query, key, value), shapes, strict=True):
        assert shape is not None, "all are given"
        check_heads("attention", layout, shape, options["head_dim"])
    return Sharding(output, shapes[0], independent(output, layouts))


ATTENTION = Op("attention", reference.forward, None, _rule)
