"""swiglu_linear on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from weft.mesh import Layout, LayoutError, infer

from ..dispatch.op import Op
from ..dispatch.sharded import Shapes, Sharding, apply, autocasts, check_operands
from ..matmul.checks import check_wide
from ..matmul.sharded.layout_rule import linear_gradients, linear_output, summed_axes, without_partial
from ..swiglu import function as swiglu
from . import function


@autocasts("swiglu_linear")
def swiglu_linear(input: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """`silu(input @ gate_weight.T) * (input @ up_weight.T)` (Shazeer, 2020), in one op.

    input: [..., K].
    gate_weight, up_weight: [M, K].
    Returns [..., M]. On a GPU, one kernel reads the input once, where this was measured faster than two products of
    torch and a gate. Saved for backward: the operands and both products.

    Layouts: those of `linear`, the same for both weights; column parallel weights shard the output. Weights sharded
    on K are refused: silu of a Partial(sum) product would be silu of addends.
    Communication: none.
    Raises LayoutError for any other layouts; ValueError for mismatched shapes, dtypes or devices, and
    for factors of 8 bits.
    """
    check_operands("swiglu_linear", ("input", "gate_weight", "up_weight"), 3, input, gate_weight, up_weight)
    shape, weight_shape = input.shape, gate_weight.shape
    if len(weight_shape) != 2 or weight_shape != up_weight.shape or not shape or shape[-1] != weight_shape[1]:
        raise ValueError(
            f"swiglu_linear takes input [..., K] and two weights [M, K], got {tuple(shape)}, {tuple(weight_shape)} and "
            f"{tuple(up_weight.shape)}; all last sizes must be equal, and both weights of one shape: transpose a "
            f"weight with .mT where this is meant"
        )
    check_wide("swiglu_linear", input, gate_weight, up_weight)
    return apply(SWIGLU_LINEAR, input, gate_weight, up_weight)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    input, gate_weight, up_weight = layouts
    input_shape, weight_shape, _ = shapes
    assert input is not None and gate_weight is not None and input_shape and weight_shape, "apply passes all three"
    dims = len(input_shape)
    output = linear_output("swiglu_linear", input, gate_weight, dims, "gate_weight")
    if up_weight is not None and up_weight != gate_weight:
        raise LayoutError(
            f"swiglu_linear: gate_weight is ({gate_weight}), and up_weight ({up_weight}); reshard up_weight to "
            f"({gate_weight})",
            (gate_weight,),
        )
    if addends := summed_axes(output):
        wanted = input.replace(**addends), gate_weight.replace(**addends)
        raise LayoutError(
            f"swiglu_linear: the products are ({output}), and silu needs their sum, not its addends; reshard the input "
            f"to ({wanted[0]}) and the weights to ({wanted[1]}), or call linear for each weight, reshard both outputs "
            f"to ({without_partial(output)}), and call swiglu",
            (*wanted, wanted[1]),
        )

    def gradient_layouts(grad: Layout) -> tuple[Layout | None, ...]:
        grad = infer.gradient(output, grad, output, (output,))
        of_input, of_weight = linear_gradients("swiglu_linear", grad, input, gate_weight, dims, "gate_weight")
        return of_input, of_weight, of_weight

    return Sharding(output, (*input_shape[:-1], weight_shape[0]), gradient_layouts)


def _inference(*tensors: Tensor) -> Tensor:
    return function.forward(*tensors, keep=False)[0]


SWIGLU_LINEAR = Op(
    "swiglu_linear",
    function.forward,
    function.backward,
    _rule,
    inference=_inference,
    weights=(1, 2),
    epilogue_backward=function.epilogue_backward,
    recompute=swiglu.recompute,
    recompute_from=3,
)
