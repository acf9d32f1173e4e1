"""What elementwise ops on two tensors have in common: one shape, one layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..sharded import Shapes, Sharding, independent


def check_same_shape(name: str, x: Tensor, y: Tensor) -> None:
    """Raises ValueError for operands of two shapes: these ops do not broadcast."""
    if x.shape != y.shape:
        raise ValueError(f"{name} takes two tensors of one shape, got {tuple(x.shape)} and {tuple(y.shape)}")


def pair_rule(name: str, *, linear: bool) -> Callable[..., Sharding]:
    """The rule of an op whose operands lie alike, and its output as they do. linear: Partial(sum) passes."""

    def rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
        x, y = layouts
        assert x is not None and y is not None and shapes[0] is not None, "both are given"
        output = infer.elementwise(name, linear, x, y)
        return Sharding(output, shapes[0], independent(output, layouts))

    return rule
