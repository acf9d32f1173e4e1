"""RMS norm on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..dispatch.arguments import check_number, described, is_int
from ..dispatch.backend import check_floats
from ..dispatch.op import Op
from ..dispatch.sharded import (
    Shapes,
    Sharding,
    apply,
    apply_many,
    autocasts,
    check_operands,
    infer_gradient_layouts,
    require_one_layout,
)
from ..dispatch.sharded.rules import check_heads
from . import function


@autocasts("rms_norm")
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, head_dim: int | None = None) -> Tensor:
    """`x / sqrt(mean(x**2) + eps) * weight`, the mean over the last dim (Zhang & Sennrich, 2019).

    x: [..., H].
    weight: [H], or None for a norm without weight.
    Returns [..., H].
    head_dim: D, for x [..., heads * D] and weight [D]: each head is normalized by itself, and all heads share the
    weight. None: whole rows.

    Layouts: any without Partial and with the last dim not sharded; with head_dim the last dim may be sharded by
    complete heads. The weight is replicated, with a gradient Partial(sum) on each axis which shards x. The output has
    x's layout.
    Communication: none.
    Raises LayoutError for further layouts; ValueError for mismatched shapes, for tensors without floating-point values,
    for tensors on two devices, and for an eps which is no finite number of 0 or more.
    """
    check_operands("rms_norm", ("x", "weight"), 1, x, weight)
    check_number("rms_norm", "eps", eps, 0)
    if head_dim is not None and (not is_int(head_dim) or x.ndim < 1 or head_dim < 1 or x.shape[-1] % head_dim):
        raise ValueError(
            f"rms_norm: head_dim is {described(head_dim)}, for x of shape {tuple(x.shape)}; give a head_dim, 1 or "
            f"more, which divides the last size of x"
        )
    size = x.shape[-1:] if head_dim is None else (head_dim,)
    if x.ndim < 1 or (weight is not None and weight.shape != size):
        row, weight_shape = ("H", "H") if head_dim is None else (f"heads * {head_dim}", str(head_dim))
        shape = None if weight is None else tuple(weight.shape)
        raise ValueError(
            f"rms_norm takes x [..., {row}] and weight [{weight_shape}], got {tuple(x.shape)} and {shape}; give a "
            f"number for each element of a {'row' if head_dim is None else 'head'}"
        )
    check_floats("rms_norm", ("x", "the weight"), x, weight)
    return apply(RMS_NORM, x, weight, eps=eps, head_dim=head_dim)


@autocasts("add_rms_norm")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`x + residual`, and the `rms_norm` of this sum, in a single pass: a layer's output joins the residual stream.

    x, residual: [..., H], of the same shape.
    weight: [H], or None.
    Returns (sum, norm), each [..., H].

    Layouts: the same for x and residual, without Partial and the last dim not sharded. Both outputs have this layout.
    The gradients of both outputs must arrive in the same layout.
    Communication: none.
    Raises ValueError for a residual of a different shape, and as `rms_norm`; LayoutError for further layouts.
    """
    check_operands("add_rms_norm", ("x", "residual", "weight"), 2, x, residual, weight)
    check_number("add_rms_norm", "eps", eps, 0)
    if x.shape != residual.shape:
        raise ValueError(
            f"add_rms_norm takes x and a residual of one shape, got {tuple(x.shape)} and {tuple(residual.shape)}; "
            f"expand one"
        )
    if x.ndim < 1 or (weight is not None and weight.shape != x.shape[-1:]):
        shape = None if weight is None else tuple(weight.shape)
        raise ValueError(
            f"add_rms_norm takes x [..., H] and weight [H], got {tuple(x.shape)} and {shape}; give a number for each "
            f"element of a row"
        )
    check_floats("add_rms_norm", ("x", "the residual", "the weight"), x, residual, weight)
    total, normal = apply_many(ADD_RMS_NORM, x, residual, weight, eps=eps)
    return total, normal


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, weight = layouts
    shape, _ = shapes
    assert x is not None and shape is not None, "x is given"
    head_dim = options["head_dim"]
    output = infer.whole("rms_norm", "x", x, len(shape) - 1 if head_dim is None else ())
    if head_dim is not None:
        check_heads("rms_norm", x, shape, head_dim)
    if weight is not None:
        infer.whole("rms_norm", "the weight", weight, 0)
    return Sharding(output, shape, infer_gradient_layouts(output, layouts))


def _add_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, residual, weight = layouts
    shape = shapes[0]
    assert x is not None and residual is not None and shape is not None, "both are given"
    infer.elementwise("add_rms_norm", False, x, residual, operands=("x", "the residual"))
    output = infer.whole("add_rms_norm", "x", x, len(shape) - 1)
    if weight is not None:
        infer.whole("add_rms_norm", "the weight", weight, 0)
    gradient_layouts = require_one_layout("add_rms_norm", infer_gradient_layouts(output, layouts), num_shared=2)
    return Sharding(output, shape, gradient_layouts, further_outputs=((output, shape),))


RMS_NORM = Op(
    "rms_norm", function.forward, function.backward, _rule, inference=function.inference, recompute=function.recompute
)
ADD_RMS_NORM = Op(
    "add_rms_norm",
    function.add_forward,
    function.add_backward,
    _add_rule,
    inference=function.add_inference,
    recompute=function.recompute,
)
