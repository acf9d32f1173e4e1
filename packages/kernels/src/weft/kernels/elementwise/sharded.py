"""add on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..op import Op
from ..sharded import Shapes, Sharding, apply, independent
from . import reference
from .shapes import check_same_shape


def add(x: Tensor, y: Tensor) -> Tensor:
    """`x + y`, for residual streams: unlike DTensor's own addition it never communicates to make layouts agree.

    x, y: one shape, which the output has too.
    Layouts: one for both, Partial(sum) included; the output lies the same. Communication: none.
    """
    check_same_shape("add", x, y)
    return apply(ADD, x, y)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, y = layouts
    assert x is not None and y is not None and shapes[0] is not None, "both are given"
    output = infer.elementwise("add", True, x, y)
    return Sharding(output, shapes[0], independent(output, layouts))


ADD = Op("add", reference.forward, reference.backward, _rule)
