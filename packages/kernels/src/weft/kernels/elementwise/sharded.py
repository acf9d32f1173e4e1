"""add on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..dispatch.op import Op
from ..dispatch.sharded import Shapes, Sharding, apply, autocasts, check_devices, independent
from . import reference


@autocasts("add")
def add(x: Tensor, y: Tensor, *, alpha: float = 1) -> Tensor:
    """`x + alpha * y`, for residual streams. Unlike the addition of DTensors, `add` never reshards an operand.

    x: any shape. Returns a tensor of this shape.
    y: the shape of x, or x's last dims: learned positions [T, H] are added to x [B, T, H].

    Layouts: the same for x and y, Partial(sum) included. A y with fewer dims is sharded as x is on the dims of y, and
    no Partial is allowed; y's gradient is Partial(sum) on the axes which shard the missing dims. The output has x's
    layout.
    Communication: none.
    Raises LayoutError for other layouts; ValueError for other shapes, and for tensors on two devices.
    """
    repeated = x.ndim - y.ndim
    if repeated < 0 or x.shape[repeated:] != y.shape:
        raise ValueError(
            f"add takes two tensors of one shape, or y with the last dims of x, got {tuple(x.shape)} and "
            f"{tuple(y.shape)}; exchange or expand them"
        )
    check_devices("add", x, y)
    return apply(ADD, x, y, repeated=repeated, alpha=alpha)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, y = layouts
    shape, last = shapes
    assert x is not None and y is not None and shape is not None and last is not None, "both are given"
    if options["repeated"]:
        output = infer.elementwise("add", False, x, y, shapes=(shape, last), operands=("x", "y"))
    else:
        output = infer.elementwise("add", True, x, y, operands=("x", "y"))
    return Sharding(output, shape, independent(output, layouts))


ADD = Op("add", reference.forward, reference.backward, _rule)
