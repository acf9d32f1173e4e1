"""matmul on plain tensors and DTensors."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, infer

from ...op import Op
from ...sharded import Shapes, Sharding, apply, autocasts, check_devices
from .. import function
from ..checks import check_accumulation, check_matmul
from .layouts import GRADIENT, adds, check_activation, check_operand, check_residual_layout, kept, whole


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
    """`act(alpha * a @ b + bias) + beta * residual`, in one kernel on a GPU where more than a bias follows the product.

    a: [..., M, K], b: [K, N] or, with the leading dims of a, [..., K, N]. Returns [..., M, N], in out_dtype or a's dtype, bfloat16
    for 8-bit factors; sums are of float32, rounded once.
    Any strides. Factors of two dims are never copied. Leading dims are taken as one, and beside a b of two dims so are they and M: what
    no view makes so is copied, as a of three dims that is transposed beside such a b, or heads of [B, T, h, D].transpose(1, 2).
    bias: [N], of the factors' dtype or the output's. residual: any shape that broadcasts to the output; one that lacks leading dims is
    expanded in memory. activation: as of `linear`.
    accumulate_into: a tensor of the output's shape, float32 for 16-bit factors, to which a @ b is added in place, and which is
    returned: the gradient of a weight over microbatches. Nothing follows the product then, and no gradient is recorded.
    a_scale, b_scale: float32, what 8-bit factors are multiplied by: one number, or one a row of a, and one a column of b. Such
    factors have no gradient.
    float32 is multiplied in tf32 where torch is told so, by `torch.set_float32_matmul_precision`, and never otherwise.
    Saved for backward: a, b and, with an activation, what it is applied to; of relu without a residual the output instead.
    Layouts: as of the einsum "...mk,kn->...mn", or "...mk,...kn->...mn". A bias lies as the output's last dim, a residual as the
    output; where that is Partial(sum) they are whole, and are added at one coordinate alone, and there is no activation.
    accumulate_into lies as the output. Communication: none.
    Raises LayoutError for any other layouts, ValueError for shapes, dtypes, devices and options that do not go together.
    """
    if activation is None and out_dtype is None and alpha == 1:
        found = function.native_matmul(a, b, bias, residual, a_scale, b_scale, accumulate_into)
        if found is not None:
            return found
    check_matmul(a, b, bias, activation, residual, out_dtype, a_scale, b_scale)
    check_devices("matmul", a, b, bias, residual, a_scale, b_scale, accumulate_into)
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


class Terms:
    """The dims of a product as letters."""

    def __init__(self, a: tuple[int, ...], b: tuple[int, ...]) -> None:
        self.rows = ascii_lowercase[: len(a) - 1]
        self.a = f"{self.rows}z"
        self.b = "zy" if len(b) == 2 else f"{self.rows[:-1]}zy"
        self.output = f"{self.rows}y"
        self.shape = (*a[:-1], b[-1])

    def product(self, op: str, a: Layout, b: Layout) -> Layout:
        """The output's layout. op: in messages."""
        return infer.einsum(f"{self.a},{self.b}->{self.output}", a, b, name=op, operands=("a", "b"))

    def gradients(self, op: str, grad: Layout, a: Layout, b: Layout) -> tuple[Layout, Layout]:
        """Those of a and b, from the output's."""
        return (
            infer.einsum(
                f"{self.output},{self.b}->{self.a}", grad, b, name=f"{op}, backward", operands=(GRADIENT, "b")
            ),
            infer.einsum(
                f"{self.output},{self.a}->{self.b}", grad, a, name=f"{op}, backward", operands=(GRADIENT, "a")
            ),
        )


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    a, b, bias, residual, a_scale, b_scale = layouts
    a_shape, b_shape, _, residual_shape, a_scale_shape, b_scale_shape = shapes
    assert a is not None and b is not None and a_shape and b_shape, "both are given"
    terms = Terms(a_shape, b_shape)
    output = terms.product("matmul", a, b)
    check_operand("matmul", "bias", bias, kept(output, terms.output, "y"), output)
    check_operand("matmul", "a_scale", a_scale, kept(a, terms.a, terms.rows if a_scale_shape else ""), output)
    check_operand("matmul", "b_scale", b_scale, kept(b, terms.b, "y" if b_scale_shape else ""), output)
    check_activation("matmul", options["activation"], output)
    complete = whole(output)
    if residual is not None:
        assert residual_shape is not None, "it has a layout"
        check_residual_layout("matmul", residual, residual_shape, complete, terms.shape, output)

    def gradients(grad: Layout) -> tuple[Layout | None, ...]:
        if options["activation"] is not None:
            grad = infer.gradient(output, grad, output, (output,))
        return (
            *terms.gradients("matmul", grad, a, b),
            None if bias is None else infer.einsum(f"{terms.output}->y", grad),
            None if residual is None else infer.gradient(complete, grad, residual, (complete, residual)),
            None,
            None,
        )

    def local(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        adding = adds(output, rank)
        return {"add_bias": adding, "add_residual": adding}

    return Sharding(output, terms.shape, gradients, local)


def _rule_of_accumulation(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    a, b, into = layouts
    a_shape, b_shape, _ = shapes
    assert a is not None and b is not None and into is not None and a_shape and b_shape, "all are given"
    terms = Terms(a_shape, b_shape)
    output = terms.product("matmul", a, b)
    check_operand("matmul", "sum to accumulate into", into, output, output)
    return Sharding(output, terms.shape, lambda grad: (None, None, None))


def _dtype(dtype: torch.dtype, options: dict[str, Any]) -> torch.dtype:
    wanted: torch.dtype | None = options["out_dtype"]
    return wanted or dtype


def _inferred(*tensors: Tensor | None, **options: Any) -> Tensor:
    return function.matmul(*tensors, keep=False, **options)[0]  # type: ignore[arg-type]  # the factors are given


MATMUL = Op("matmul", function.matmul, function.matmul_backward, _rule, _dtype, inference=_inferred)
ACCUMULATE = Op(
    "matmul_accumulate", function.accumulate_into, lambda *_, **__: (None, None, None), _rule_of_accumulation
)
