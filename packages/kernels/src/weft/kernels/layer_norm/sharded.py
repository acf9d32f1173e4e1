"""Layer norm on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from weft.mesh import Layout, infer

from ..dispatch.arguments import check_number
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
from . import function


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """`(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`, over the last dim (Ba et al., 2016).

    x: [..., H].
    weight, bias: [H], or None for a norm without them.
    Returns [..., H] in the dtype of x.

    Layouts: any without Partial and with the last dim not sharded; weight and bias replicated. The output has x's
    layout.
    Communication: none.
    Raises LayoutError for any other layouts; ValueError for other shapes, for tensors without floating-point values,
    for tensors on two devices, and for an eps which is no finite number of 0 or more.
    """
    check_number("layer_norm", "eps", eps, 0)
    if function.is_native(x, weight, bias):
        return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return _normalize(x, weight, bias, eps)


@autocasts("layer_norm")
def _normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`layer_norm` by the op `LAYER_NORM`."""
    check_operands("layer_norm", ("x", "weight", "bias"), 1, x, weight, bias)
    _check("layer_norm", x, weight, bias)
    return apply(LAYER_NORM, x, weight, bias, eps=eps)


@autocasts("add_layer_norm")
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """`x + residual`, and the `layer_norm` of this sum, in one pass.

    For a transformer block: x is a layer's output, residual the residual stream, and the norm begins the next layer.

    x, residual: [..., H], of the same shape.
    weight, bias: [H], or None.
    Returns (sum, norm), each [..., H].

    Layouts: the same for x and residual, without Partial and with the last dim not sharded; both outputs have it, too.
    The gradients of both outputs must arrive in the same layout.
    Communication: none.
    Raises ValueError for a residual of another shape, and as `layer_norm`; LayoutError for other layouts.
    """
    check_number("add_layer_norm", "eps", eps, 0)
    is_native = residual is not None and function.is_native(x, weight, bias, residual)
    if is_native and x.shape == residual.shape:
        total = x + residual
        return total, torch.layer_norm(total, x.shape[-1:], weight, bias, eps)
    check_operands("add_layer_norm", ("x", "residual", "weight", "bias"), 2, x, residual, weight, bias)
    if x.shape != residual.shape:
        raise ValueError(
            f"add_layer_norm takes x and a residual of one shape, got {tuple(x.shape)} and {tuple(residual.shape)}; "
            f"expand one"
        )
    _check("add_layer_norm", x, weight, bias, residual)
    total, normal = apply_many(ADD_LAYER_NORM, x, residual, weight, bias, eps=eps)
    return total, normal


def _check(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None) -> None:
    for name, each in (("weight", weight), ("bias", bias)):
        if x.ndim < 1 or (each is not None and each.shape != x.shape[-1:]):
            shape = None if each is None else tuple(each.shape)
            raise ValueError(
                f"{op} takes x [..., H] and {name} [H], got {tuple(x.shape)} and {shape}; give a number for each "
                f"element of a row"
            )
    check_floats(op, ("x", "the residual", "the weight", "the bias"), x, residual, weight, bias)


def _whole(op: str, x: Layout, shape: tuple[int, ...], weight: Layout | None, bias: Layout | None) -> Layout:
    """The output's layout: x's. Raises LayoutError where the last dim of x, the weight or the bias is sharded."""
    output = infer.whole(op, "x", x, len(shape) - 1)
    for name, each in (("the weight", weight), ("the bias", bias)):
        if each is not None:
            infer.whole(op, name, each, 0)
    return output


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, weight, bias = layouts
    shape = shapes[0]
    assert x is not None and shape is not None, "x is given"
    output = _whole("layer_norm", x, shape, weight, bias)
    return Sharding(output, shape, infer_gradient_layouts(output, layouts))


def _add_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, residual, weight, bias = layouts
    shape = shapes[0]
    assert x is not None and residual is not None and shape is not None, "both are given"
    infer.elementwise("add_layer_norm", False, x, residual, operands=("x", "the residual"))
    output = _whole("add_layer_norm", x, shape, weight, bias)
    gradient_layouts = require_one_layout("add_layer_norm", infer_gradient_layouts(output, layouts), num_shared=2)
    return Sharding(output, shape, gradient_layouts, further_outputs=((output, shape),))


LAYER_NORM = Op("layer_norm", function.forward, function.backward, _rule, recompute=function.recompute)
ADD_LAYER_NORM = Op(
    "add_layer_norm",
    function.add_forward,
    function.add_backward,
    _add_rule,
    recompute=function.recompute,
)
