"""swiglu on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..op import Op
from ..sharded import Shapes, Sharding, apply, autocasts, independent
from . import reference


@autocasts("swiglu")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` (Shazeer, 2020).

    gate, up: one shape, which the output has too.
    Layouts: one for both, without Partial; the output lies the same. Communication: none.
    """
    if gate.shape != up.shape:
        raise ValueError(f"swiglu takes two tensors of one shape, got {tuple(gate.shape)} and {tuple(up.shape)}")
    return apply(SWIGLU, gate, up)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    gate, up = layouts
    assert gate is not None and up is not None and shapes[0] is not None, "both are given"
    output = infer.elementwise("swiglu", False, gate, up)
    return Sharding(output, shapes[0], independent(output, layouts))


SWIGLU = Op("swiglu", reference.forward, reference.backward, _rule)
