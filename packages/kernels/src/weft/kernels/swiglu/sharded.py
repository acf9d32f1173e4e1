"""SwiGLU, GeGLU and GELU on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..dispatch.arguments import check_choice, check_tensors
from ..dispatch.backend import check_floats
from ..dispatch.op import Op
from ..dispatch.sharded import Shapes, Sharding, apply, autocasts, check_operands, infer_gradient_layouts
from . import function

FORMS = ("none", "tanh")


@autocasts("swiglu")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` (Shazeer, 2020).

    gate, up: tensors of the same shape. Returns a tensor of this shape.

    Layouts: the same for gate, up and output, without Partial.
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

    gate, up: tensors of the same shape. Returns a tensor of this shape.
    approximate: as in `gelu`; Gemma uses "tanh".

    Layouts: the same for gate, up and output, without Partial.
    Communication: none.
    Raises ValueError as `swiglu` does, and for an unknown approximation.
    """
    check_choice("geglu", "approximate", approximate, FORMS)
    native = function.native(gate, up, approximate)
    if native is not None:
        return native
    _check("geglu", gate, up)
    return apply(GEGLU, gate, up, activation=approximate)


def _check(name: str, gate: Tensor, up: Tensor) -> None:
    check_operands(name, ("gate", "up"), 2, gate, up)
    if gate.shape != up.shape:
        raise ValueError(
            f"{name} takes two tensors of one shape, got {tuple(gate.shape)} and {tuple(up.shape)}; expand one"
        )
    check_floats(name, ("gate", "up"), gate, up)


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


@autocasts("gelu")
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """`x * Phi(x)`, where Phi is the normal distribution function (Hendrycks & Gimpel, 2016).

    x: any shape. Returns a tensor of this shape.
    approximate: "none", or "tanh" for the form GPT-2 was trained with, as in torch.nn.functional.gelu.

    Layouts: any without Partial; the output has x's layout.
    Communication: none.
    Raises LayoutError where x is Partial; ValueError for another approximation, and for x without floating-point
    values.
    """
    check_choice("gelu", "approximate", approximate, FORMS)
    native = function.gelu_native(x, approximate)
    if native is not None:
        return native
    check_tensors("gelu", ("x",), x)
    check_floats("gelu", ("x",), x)
    return apply(GELU, x, approximate=approximate)


def _gelu_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    (x,), (shape,) = layouts, shapes
    assert x is not None and shape is not None, "x is given"
    output = infer.elementwise("gelu", False, x, operands=("x",))
    return Sharding(output, shape, infer_gradient_layouts(output, layouts))


GELU = Op("gelu", function.gelu_forward, function.gelu_backward, _gelu_rule, recompute=function.gelu_recompute)
