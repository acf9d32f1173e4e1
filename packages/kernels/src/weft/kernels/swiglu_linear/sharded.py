"""swiglu_linear on plain tensors and DTensors."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..checks import check_devices
from ..matmul.checks import check_wide
from ..matmul.sharded.layouts import check_activation, check_operand
from ..op import Op
from ..sharded import Shapes, Sharding, apply, autocasts
from ..swiglu import function as swiglu
from . import function


@autocasts("swiglu_linear")
def swiglu_linear(input: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """`silu(input @ gate_weight.T) * (input @ up_weight.T)` (Shazeer, 2020), in one op.

    input: [..., K]. gate_weight, up_weight: [M, K]. Returns [..., M]. On a GPU by one kernel that reads the input once, where that was
    measured faster than torch's two products and a gate. Saved for backward: the operands and both products.
    Layouts: as of `linear`, one for both weights; column parallel shards the output. None where a sum over ranks would be left,
    for silu and the product are of whole sums: a weight sharded on K is a LayoutError. Communication: none.
    Raises ValueError for shapes, dtypes and devices that do not go together, and for factors of 8 bits.
    """
    shape, of_weight = input.shape, gate_weight.shape
    if len(of_weight) != 2 or of_weight != up_weight.shape or not shape or shape[-1] != of_weight[1]:
        raise ValueError(
            f"swiglu_linear takes input [..., K] and two weights [M, K], got {tuple(shape)}, {tuple(of_weight)} and "
            f"{tuple(up_weight.shape)}; the last sizes are one, and so are the weights' shapes: transpose a weight with .mT where "
            f"that is meant"
        )
    check_wide("swiglu_linear", input, gate_weight, up_weight)
    check_devices("swiglu_linear", input, gate_weight, up_weight)
    return apply(SWIGLU_LINEAR, input, gate_weight, up_weight)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    input, gate_weight, up_weight = layouts
    input_shape, weight_shape, _ = shapes
    assert input is not None and gate_weight is not None and input_shape and weight_shape, "all are given"
    lead = ascii_lowercase[: len(input_shape) - 1]
    output = infer.einsum(f"{lead}z,yz->{lead}y", input, gate_weight)
    check_operand("swiglu_linear", "weight up", up_weight, gate_weight, output)
    check_activation("swiglu_linear", "swiglu", output)

    def gradients(grad: Layout) -> tuple[Layout | None, ...]:
        grad = infer.gradient(output, grad, output, (output,))
        of_weight = infer.einsum(f"{lead}y,{lead}z->yz", grad, input)
        return infer.einsum(f"{lead}y,yz->{lead}z", grad, gate_weight), of_weight, of_weight

    return Sharding(output, (*input_shape[:-1], weight_shape[0]), gradients)


def _inferred(*tensors: Tensor) -> Tensor:
    return function.forward(*tensors, keep=False)[0]


SWIGLU_LINEAR = Op(
    "swiglu_linear",
    function.forward,
    function.backward,
    _rule,
    inference=_inferred,
    weights=(1, 2),
    of_products=function.of_products,
    again=swiglu.again,
    again_from=3,
)
