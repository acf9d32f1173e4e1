"""`linear` on plain tensors and DTensors."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, LayoutError, infer

from ...dispatch.op import Op
from ...dispatch.sharded import Shapes, Sharding, apply, autocasts, check_operands
from .. import function
from ..checks import check_activation_name, check_bias_dtype, check_wide
from .layout_rule import (
    adds_bias,
    check_activation,
    check_operand,
    layout_of_dims,
    linear_gradients,
    linear_output,
    summed_axes,
)


@autocasts("linear")
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    input_activation: str | None = None,
) -> Tensor:
    """`act(input_act(input) @ weight.T + bias)`. An activation of None is left out.

    input: [..., K]. Any strides; the input is copied only where no view [N, K] exists.
    weight: [M, K].
    bias: [M] in the dtype of input and weight, or None.
    Returns [..., M].
    activation: "gelu", "gelu_tanh" (the form GPT-2 was trained with), "silu", "relu" or "relu2" (relu squared; So et
    al. 2021). On a GPU the activation is computed before the product is stored.
    input_activation: an activation of the input, as in the second layer of an MLP. Backward recomputes the activation,
    and on a GPU multiplies the input's gradient by the derivative before storing: no extra tensor is saved, and no
    extra pass is made.

    Saved for backward: input, weight and, with an activation, the pre-activation; for relu the output instead.

    Layouts: as in the einsum "...k,mk->...m". A weight sharded on M shards the output (column parallel). An input
    and a weight sharded on K give a Partial(sum) output (row parallel): coordinate 0 of the axis adds the bias, and
    an activation is refused.
    Communication: none.
    Raises LayoutError for further layouts; ValueError for mismatched shapes, dtypes or devices, for
    another activation, and for factors of 8 bits, which need `matmul` with scales.
    """
    has_activation = activation is not None or input_activation is not None
    native = None if has_activation else function.native_linear(input, weight, bias)
    if native is not None:
        return native
    _check_linear("linear", input, weight, bias)
    if not has_activation:
        return apply(LINEAR, input, weight, bias)
    check_activation_name("linear", "activation", activation)
    check_activation_name("linear", "input_activation", input_activation)
    return apply(LINEAR, input, weight, bias, activation=activation, input_activation=input_activation)


def _check_linear(op: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raises ValueError for operands of `linear` with mismatched shapes, dtypes or devices. op: for the message."""
    check_operands(op, ("input", "weight", "bias"), 2, input, weight, bias)
    check_sizes(op, input, weight, bias)
    check_wide(op, input, weight)
    check_bias_dtype(op, bias, input)


def check_sizes(op: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raises ValueError for mismatched shapes. Called by `_check_linear` and `qkv_linear`. op: for the message."""
    if weight.ndim != 2 or input.ndim < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{op} takes input [..., K] and weight [M, K], got {tuple(input.shape)} and {tuple(weight.shape)}; their "
            f"last sizes must be equal: transpose the weight with .mT where this is meant"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{op} takes a bias of shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}; expand or flatten it"
        )


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `LINEAR`. layouts, shapes: of input, weight and bias."""
    input, weight, bias = layouts
    input_shape, weight_shape, _ = shapes
    assert input is not None and weight is not None and input_shape and weight_shape, "both are given"
    leading = ascii_lowercase[: len(input_shape) - 1]
    output = linear_output("linear", input, weight, len(input_shape))
    check_operand("linear", "bias", bias, layout_of_dims(output, f"{leading}y", "y"), output)
    activation = options.get("activation")
    check_activation("linear", activation, output)
    if options.get("input_activation") is not None and (addends := summed_axes(input)):
        complete = input.replace(**addends)
        raise LayoutError(
            f"linear: the input is ({input}), and {options['input_activation']} needs the sum, not its addends; "
            f"reshard the input to ({complete})",
            (complete,),
        )

    def gradient_layouts(grad: Layout) -> tuple[Layout | None, ...]:
        if activation is not None:
            grad = infer.gradient(output, grad, output, (output,))
        return (
            *linear_gradients("linear", grad, input, weight, len(input_shape)),
            None if bias is None else infer.einsum(f"{leading}y->y", grad),
        )

    def local_options(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"add_bias": adds_bias(output, rank)}

    return Sharding(output, (*input_shape[:-1], weight_shape[0]), gradient_layouts, local_options)


def _inference(input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """The output alone, with nothing saved for backward: called when grad mode is off."""
    return function.linear(input, weight, bias, keep=False, **options)[0]


LINEAR = Op(
    "linear",
    function.linear,
    function.linear_backward,
    _rule,
    inference=_inference,
    weights=(1, 2),  # weight and bias, whose gradients may be delayed
    epilogue_backward=function.linear_epilogue_backward,
)
