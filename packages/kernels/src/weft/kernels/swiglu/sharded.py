"""SwiGLU and GeGLU on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..dispatch.backend import check_floats
from ..dispatch.op import Op
from ..dispatch.sharded import Shapes, Sharding, apply, autocasts, check_devices, infer_gradient_layouts
from . import function

FORMS = ("none", "tanh")


@autocasts("swiglu")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` (Shazeer, 2020).

    gate, up: tensors of one shape. Returns a tensor of this shape.

    Layouts: the same for both, without Partial; the output has it, too.
    Communication: none.
    Raises ValueError for different shapes or devices, and for tensors without floating-point values.
    """
    native = function.native(gate, up)
    if native is not None:
        return native
    _check("swiglu", gate, up)
    return apply(SWIGLU, gate, up)


@autocasts("geglu")
def geglu(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    """`gelu(gate) * up` (Shazeer, 2020).

    gate, up: tensors of one shape. Returns a tensor of this shape.
    approximate: as in `gelu`; Gemma uses "tanh".

    Layouts: the same for both, without Partial; the output has it, too.
    Communication: none.
    Raises ValueError as `swiglu` does, and for another approximation.
    """
    check_form("geglu", approximate)
    native = function.native(gate, up, approximate)
    if native is not None:
        return native
    _check("geglu", gate, up)
    return apply(GEGLU, gate, up, activation=approximate)


def check_form(name: str, approximate: str) -> None:
    """Raises ValueError unless `approximate` is one of FORMS. name: the op, for the message."""
    if approximate not in FORMS:
        raise ValueError(f"{name}: approximate is {approximate!r}; give one of {', '.join(map(repr, FORMS))}")


def _check(name: str, gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape:
        raise ValueError(
            f"{name} takes two tensors of one shape, got {tuple(gate.shape)} and {tuple(up.shape)}; expand one"
        )
    check_floats(name, ("gate", "up"), gate, up)
    check_devices(name, gate, up)


def _rule_of(name: str) -> Any:
    def rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
        gate, up = layouts
        assert gate is not None and up is not None and shapes[0] is not None, "both are given"
        output = infer.elementwise(name, False, gate, up, operands=("gate", "up"))
        return Sharding(output, shapes[0], infer_gradient_layouts(output, layouts))

    return rule


SWIGLU, GEGLU = (
    Op(
        name,
        function.forward,
        function.backward,
        _rule_of(name),
        inference=function.inference,
        recompute=function.recompute,
    )
    for name in ("swiglu", "geglu")
)
