"""GELU on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..dispatch.arguments import check_choice, check_tensors
from ..dispatch.backend import check_floats
from ..dispatch.op import Op
from ..dispatch.sharded import Shapes, Sharding, apply, autocasts, infer_gradient_layouts
from ..swiglu.sharded import FORMS
from . import function


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
    native = function.native(x, approximate)
    if native is not None:
        return native
    check_tensors("gelu", ("x",), x)
    check_floats("gelu", ("x",), x)
    return apply(GELU, x, approximate=approximate)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    (x,), (shape,) = layouts, shapes
    assert x is not None and shape is not None, "x is given"
    output = infer.elementwise("gelu", False, x, operands=("x",))
    return Sharding(output, shape, infer_gradient_layouts(output, layouts))


GELU = Op("gelu", function.forward, function.backward, _rule, recompute=function.recompute)
