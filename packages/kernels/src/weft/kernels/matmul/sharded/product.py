"""`matmul` and `linear` on plain tensors and DTensors."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, LayoutError, infer

from ...dispatch.op import Op
from ...dispatch.sharded import Shapes, Sharding, apply, autocasts, check_operands
from .. import function
from ..checks import (
    check_accumulation,
    check_activation_name,
    check_bias_dtype,
    check_factors,
    check_matmul,
    check_wide,
)
from .layout_rule import (
    GRADIENT,
    adds_bias,
    check_activation,
    check_operand,
    check_residual_layout,
    layout_of_dims,
    linear_gradients,
    linear_output,
    output_dtype,
    summed_axes,
    without_partial,
)

NAMES = ("a", "b", "bias", "residual", "a_scale", "b_scale", "accumulate_into")  # the operands, in messages


@autocasts("matmul")
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate_into: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
) -> Tensor:
    """`act(alpha * a @ b + bias) + beta * residual`.

    On a GPU, an epilogue of more than a bias is computed in the kernel of the product, unless torch's GEMM and a
    further pass were measured to be faster.

    a: [..., M, K].
    b: [K, N], or [..., K, N] with the leading dims of a.
    Returns [..., M, N] in out_dtype; None means a's dtype, or bfloat16 for 8-bit factors. Sums are in float32,
    rounded once.
    bias, activation, residual, a_scale, b_scale: None leaves the term, the function or the factor out.
    bias: [N], in the dtype of the factors or of the output.
    activation: as in `linear`.
    residual: any shape that broadcasts to the output. A residual which broadcasts along some of the dims flattened
    below, but not along all, is first copied to full size.
    accumulate_into: a tensor of the output's shape, float32 for 16-bit factors. Adds a @ b to this tensor in place and
    returns this tensor, for a weight's gradient over microbatches. No epilogue is allowed, and no gradient is recorded.
    None: the output is a new tensor.
    a_scale, b_scale: float32 factors of 8-bit a and b: a number, or a number for each row of a and each column of b.
    8-bit factors have no gradient.

    Any strides. Leading dims are flattened: if b has two dims, a becomes [rows, K]; otherwise both factors get a single
    batch dim. A factor is copied where no view has this shape, as a transposed a of three dims with a b of two,
    or heads [B, T, h, D].transpose(1, 2). A factor of two dims is never copied.
    float32 is multiplied in tf32 only where `torch.set_float32_matmul_precision` says so.
    Saved for backward: a, b and, with an activation, the pre-activation; for relu without a residual the output
    instead.

    Layouts: as in the einsum "...mk,kn->...mn" or "...mk,...kn->...mn". The bias is sharded as the output's last dim,
    the residual as the output. Where the output is Partial(sum), bias and residual are replicated, coordinate 0 of the
    axis adds both, and an activation is refused. accumulate_into has the output's layout.
    Communication: none.
    Raises LayoutError for further layouts, ValueError for mismatched shapes, dtypes, devices or options.
    """
    check_factors("matmul", alpha, beta)
    is_alone = activation is None and out_dtype is None and alpha == 1
    if is_alone and bias is residual is a_scale is b_scale is accumulate_into is None:
        native = function.native_matmul(a, b)
        if native is not None:
            return native
    check_operands("matmul", NAMES, 2, a, b, bias, residual, a_scale, b_scale, accumulate_into)
    check_matmul(a, b, bias, activation, residual, out_dtype, a_scale, b_scale)
    if accumulate_into is not None:
        check_accumulation(a, b, accumulate_into, bias, residual, a_scale, b_scale, activation, out_dtype, alpha, beta)
        with torch.no_grad():
            apply(ACCUMULATE, a, b, accumulate_into)
        return accumulate_into
    if a.dtype.itemsize == 1:
        out_dtype = out_dtype or torch.bfloat16
    return apply(
        MATMUL,
        a,
        b,
        bias,
        residual,
        a_scale,
        b_scale,
        activation=activation,
        alpha=alpha,
        beta=beta,
        out_dtype=out_dtype,
    )


class ProductTerms:
    """The einsum letters of the dims of a product a @ b, and the layouts which follow from the letters.

    Made by the layout rules of `matmul` and of the products overlapped with communication.
    """

    def __init__(self, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
        # a's dims have the letters `rows`, then z for K. b's last dim N is y.
        self.rows = ascii_lowercase[: len(a_shape) - 1]
        self.a = f"{self.rows}z"
        self.b = "zy" if len(b_shape) == 2 else f"{self.rows[:-1]}zy"
        self.output = f"{self.rows}y"
        self.shape = (*a_shape[:-1], b_shape[-1])  # of the output

    def output_layout(self, op: str, a: Layout, b: Layout) -> Layout:
        """The output's layout. op: for messages."""
        return infer.einsum(f"{self.a},{self.b}->{self.output}", a, b, name=op, operands=("a", "b"))

    def gradient_layouts(self, op: str, grad: Layout, a: Layout, b: Layout) -> tuple[Layout, Layout]:
        """The layouts of the gradients of a and b, from the layout of the output's gradient."""
        return (
            infer.einsum(
                f"{self.output},{self.b}->{self.a}", grad, b, name=f"{op}, backward", operands=(GRADIENT, "b")
            ),
            infer.einsum(
                f"{self.output},{self.a}->{self.b}", grad, a, name=f"{op}, backward", operands=(GRADIENT, "a")
            ),
        )


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `MATMUL`. layouts, shapes: of a, b, bias, residual, a_scale and b_scale."""
    a, b, bias, residual, a_scale, b_scale = layouts
    a_shape, b_shape, _, residual_shape, a_scale_shape, b_scale_shape = shapes
    assert a is not None and b is not None and a_shape and b_shape, "both are given"
    terms = ProductTerms(a_shape, b_shape)
    output = terms.output_layout("matmul", a, b)
    check_operand("matmul", "bias", bias, layout_of_dims(output, terms.output, "y"), output)
    check_operand("matmul", "a_scale", a_scale, layout_of_dims(a, terms.a, terms.rows if a_scale_shape else ""), output)
    check_operand("matmul", "b_scale", b_scale, layout_of_dims(b, terms.b, "y" if b_scale_shape else ""), output)
    check_activation("matmul", options["activation"], output)
    complete = without_partial(output)
    if residual is not None:
        assert residual_shape is not None, "it has a layout"
        check_residual_layout("matmul", residual, residual_shape, complete, terms.shape, output)

    def gradient_layouts(grad: Layout) -> tuple[Layout | None, ...]:
        if options["activation"] is not None:
            grad = infer.gradient(output, grad, output, (output,))
        return (
            *terms.gradient_layouts("matmul", grad, a, b),
            None if bias is None else infer.einsum(f"{terms.output}->y", grad),
            None if residual is None else infer.gradient(complete, grad, residual, (complete, residual)),
            None,
            None,
        )

    def local_options(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        adding = adds_bias(output, rank)
        return {"add_bias": adding, "add_residual": adding}

    return Sharding(output, terms.shape, gradient_layouts, local_options)


def _rule_of_accumulation(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `ACCUMULATE`. layouts, shapes: of a, b and accumulate_into."""
    a, b, total_layout = layouts
    a_shape, b_shape, _ = shapes
    assert a is not None and b is not None and total_layout is not None and a_shape and b_shape, "all are given"
    terms = ProductTerms(a_shape, b_shape)
    output = terms.output_layout("matmul", a, b)
    check_operand("matmul", "sum to accumulate into", total_layout, output, output)
    return Sharding(output, terms.shape, lambda grad: (None, None, None))


def _inference(*tensors: Tensor | None, **options: Any) -> Tensor:
    """The output alone, for `Op.inference`: nothing is saved for backward."""
    return function.matmul(*tensors, keep=False, **options)[0]  # type: ignore[arg-type]  # the factors are given


MATMUL = Op("matmul", function.matmul, function.matmul_backward, _rule, output_dtype, inference=_inference)
ACCUMULATE = Op(
    "matmul_accumulate", function.accumulate_into, lambda *_, **__: (None, None, None), _rule_of_accumulation
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


def _linear_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
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


def _linear_inference(input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """The output alone, with nothing saved for backward: called when grad mode is off."""
    return function.linear(input, weight, bias, keep=False, **options)[0]


LINEAR = Op(
    "linear",
    function.linear,
    function.linear_backward,
    _linear_rule,
    inference=_linear_inference,
    weights=(1, 2),  # weight and bias, whose gradients may be delayed
    epilogue_backward=function.linear_epilogue_backward,
)
