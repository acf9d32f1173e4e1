"""qkv_linear and swiglu_linear on plain tensors and DTensors."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, LayoutError, infer

from ..dispatch.op import Op
from ..dispatch.sharded import Shapes, Sharding, apply, apply_many, autocasts, check_operands
from ..matmul.checks import check_bias_dtype, check_wide
from ..matmul.sharded.layout_rule import (
    adds_bias,
    check_operand,
    layout_of_dims,
    linear_gradients,
    linear_output,
    summed_axes,
    without_partial,
)
from ..matmul.sharded.product import check_sizes
from ..rope.sharded import check_tables, rope_layout
from ..swiglu import function as swiglu
from . import function

NAMES = ("queries", "keys", "values")
WEIGHTS = ("q_weight", "k_weight", "v_weight")
OPERANDS = ("input", *WEIGHTS, "q_bias", "k_bias", "v_bias", "cos", "sin")
ROTATED = (0, 1)  # rope applies to queries and keys


@autocasts("qkv_linear")
def qkv_linear(
    input: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in one op: `linear` of the input by three weights, then `rope` of queries and keys.

    input: [..., T, K].
    q_weight, k_weight, v_weight: [M, K], where M may differ among the three.
    q_bias, k_bias, v_bias: [M], or None.
    cos, sin: the tables of `rope`, or None for no rope.
    Returns three tensors [..., T, M].

    The input's three gradients are accumulated by the GEMMs; three separate `linear` calls would write three tensors
    and add them. Saved for backward: the operands.

    Layouts: as in `linear`, for each weight. With tables, also as in `rope`: no Partial(sum), and no shard with a
    part of a head. In backward, the three gradients of the input must have the same layout.
    Communication: none.
    Raises ValueError for mismatched shapes, dtypes or devices, LayoutError for other layouts.
    """
    tensors = (input, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, cos, sin)
    check_operands("qkv_linear", OPERANDS, 4, *tensors)
    for weight, bias in ((q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias)):
        check_sizes("qkv_linear", input, weight, bias)
        check_bias_dtype("qkv_linear", bias, input)
    check_wide("qkv_linear", input, q_weight, k_weight, v_weight)
    if (cos is None) != (sin is None):
        raise ValueError("qkv_linear takes both cos and sin, or neither; give both")
    if cos is not None and sin is not None:
        for weight in (q_weight, k_weight):
            check_tables("qkv_linear", (*input.shape[:-1], weight.shape[0]), cos, sin)
    q, k, v = apply_many(QKV_LINEAR, *tensors)
    return q, k, v


def _qkv_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    input, *operands = layouts
    weights, biases, (cos, sin) = operands[:3], operands[3:6], operands[6:]
    input_shape, table = shapes[0], shapes[7]  # table: the shape of cos
    assert input is not None and input_shape, "apply_many passes the input"
    dims = len(input_shape)
    leading = ascii_lowercase[: dims - 1]
    products: list[Layout] = []
    outputs: list[tuple[Layout, tuple[int, ...]]] = []
    for i, (weight, weight_shape, bias) in enumerate(zip(weights, shapes[1:4], biases, strict=True)):
        assert weight is not None and weight_shape is not None, "apply_many passes all weights"
        product = output = linear_output("qkv_linear", input, weight, dims, WEIGHTS[i])
        check_operand("qkv_linear", f"bias of {NAMES[i]}", bias, layout_of_dims(product, f"{leading}y", "y"), product)
        shape = (*input_shape[:-1], weight_shape[0])
        if i in ROTATED and cos is not None and sin is not None and table is not None:
            output = rope_layout("qkv_linear", product, cos, sin, shape, table)
        products.append(product)
        outputs.append((output, shape))

    def gradient_layouts(*grads: Layout | None) -> tuple[Layout | None, ...]:
        # Layout of the input's gradient -> the output it comes from, for the message.
        input_layouts: dict[Layout, str] = {}
        weight_layouts: list[Layout | None] = [None] * 3
        bias_layouts: list[Layout | None] = [None] * 3
        for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            if grad is None:
                continue
            assert weight is not None, "apply_many passes all weights"
            if i in ROTATED and cos is not None and sin is not None:
                grad = infer.gradient(outputs[i][0], grad, products[i], (products[i], cos, sin))
            input_layout, weight_layouts[i] = linear_gradients("qkv_linear", grad, input, weight, dims, WEIGHTS[i])
            input_layouts.setdefault(input_layout, f"{NAMES[i]} ({grad})")
            bias_layouts[i] = None if biases[i] is None else infer.einsum(f"{leading}y->y", grad)
        layout, *different = input_layouts
        if different:
            raise LayoutError(
                f"qkv_linear adds up the three gradients of its input, but the one from {input_layouts[layout]} is "
                f"({layout}), and the one from {input_layouts[different[0]]} is ({different[0]}); reshard one of the "
                f"outputs' gradients, or call linear for each"
            )
        return layout, *weight_layouts, *bias_layouts, None, None

    def local_options(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"add_bias": adds_bias(products[0], rank)}  # all three are Partial on the axes that shard K

    return Sharding(*outputs[0], gradient_layouts, local_options, further_outputs=tuple(outputs[1:]))


QKV_LINEAR = Op(
    "qkv_linear",
    function.qkv_forward,
    function.qkv_backward,
    _qkv_rule,
    weights=(1, 2, 3, 4, 5, 6),
    epilogue_backward=function.qkv_epilogue_backward,
)


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


def _swiglu_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
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


def _swiglu_inference(*tensors: Tensor) -> Tensor:
    return function.swiglu_forward(*tensors, keep=False)[0]


SWIGLU_LINEAR = Op(
    "swiglu_linear",
    function.swiglu_forward,
    function.swiglu_backward,
    _swiglu_rule,
    inference=_swiglu_inference,
    weights=(1, 2),
    epilogue_backward=function.swiglu_epilogue_backward,
    recompute=swiglu.recompute,
    recompute_from=3,
)
