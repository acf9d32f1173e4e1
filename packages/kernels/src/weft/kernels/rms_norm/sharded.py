"""rms_norm on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from weft.mesh import Layout, infer

from ..attention.sharded.heads import check_heads
from ..checks import check_floats
from ..op import Op
from ..sharded import Shapes, Sharding, apply, apply_many, autocasts, check_devices, independent, of_several
from . import function


@autocasts("rms_norm")
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, head_dim: int | None = None) -> Tensor:
    """`x / sqrt(mean(x**2) + eps) * weight`, the mean over the last dim (Zhang & Sennrich, 2019).

    x: [..., H]. weight: [H], or None for a norm without one. Returns [..., H].
    head_dim: D for a norm of each head of x [..., heads * D] by itself, with a weight [D] for all of them.
    Layouts: any that leaves the last dim whole, or each head where there is a `head_dim`; the output lies as `x`. The gradient
    of a replicated weight is Partial(sum) on each axis that `x` is sharded over. Communication: none.
    Raises LayoutError where the last dim, or a head, is cut, or `x` is Partial; ValueError for other shapes, for what is none of
    floats, and for two devices.
    """
    if head_dim is not None and (x.ndim < 1 or head_dim < 1 or x.shape[-1] % head_dim):
        raise ValueError(
            f"rms_norm takes x [..., heads * {head_dim}], got {tuple(x.shape)}; give a head_dim, 1 or more, that divides its last size"
        )
    size = x.shape[-1:] if head_dim is None else (head_dim,)
    if x.ndim < 1 or (weight is not None and weight.shape != size):
        row, one = ("H", "H") if head_dim is None else (f"heads * {head_dim}", str(head_dim))
        shape = None if weight is None else tuple(weight.shape)
        raise ValueError(
            f"rms_norm takes x [..., {row}] and weight [{one}], got {tuple(x.shape)} and {shape}; give a number for each "
            f"element of a {'row' if head_dim is None else 'head'}"
        )
    check_floats("rms_norm", ("x", "the weight"), x, weight)
    check_devices("rms_norm", x, weight)
    return apply(RMS_NORM, x, weight, eps=eps, head_dim=head_dim)


@autocasts("add_rms_norm")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`x + residual`, and `rms_norm` of that, in one pass: where a layer's output joins the residual stream.

    x, residual: [..., H], one shape. weight: [H], or None. Returns (sum, norm), [..., H] each.
    Layouts: one for both, which leaves the last dim whole; both outputs lie so. The gradients of the two outputs arrive in one
    layout. Communication: none.
    Raises ValueError for a residual of another shape, and as `rms_norm`; LayoutError for other layouts.
    """
    if x.shape != residual.shape:
        raise ValueError(
            f"add_rms_norm takes x and a residual of one shape, got {tuple(x.shape)} and {tuple(residual.shape)}; expand one"
        )
    if x.ndim < 1 or (weight is not None and weight.shape != x.shape[-1:]):
        shape = None if weight is None else tuple(weight.shape)
        raise ValueError(
            f"add_rms_norm takes x [..., H] and weight [H], got {tuple(x.shape)} and {shape}; give a number for each element of "
            f"a row"
        )
    check_floats("add_rms_norm", ("x", "the residual", "the weight"), x, residual, weight)
    check_devices("add_rms_norm", x, residual, weight)
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
    return Sharding(output, shape, independent(output, layouts))


def _add_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, residual, weight = layouts
    shape = shapes[0]
    assert x is not None and residual is not None and shape is not None, "both are given"
    infer.elementwise("add_rms_norm", False, x, residual, operands=("x", "the residual"))
    output = infer.whole("add_rms_norm", "x", x, len(shape) - 1)
    if weight is not None:
        infer.whole("add_rms_norm", "the weight", weight, 0)
    gradients = of_several("add_rms_norm", independent(output, layouts), shared=2)
    return Sharding(output, shape, gradients, more=((output, shape),))


RMS_NORM = Op(
    "rms_norm", function.forward, function.backward, _rule, inference=function.inference, again=function.again
)
ADD_RMS_NORM = Op(
    "add_rms_norm",
    function.add_forward,
    function.add_backward,
    _add_rule,
    inference=function.add_inference,
    again=function.again,
)
