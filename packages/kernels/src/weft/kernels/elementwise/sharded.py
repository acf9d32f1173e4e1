"""add and sigmoid_gate on plain tensors and DTensors, and their local computation: plain torch on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from weft.mesh import Layout, infer

from ..dispatch.arguments import check_number, is_int
from ..dispatch.backend import check_floats
from ..dispatch.op import Op, Tensors
from ..dispatch.sharded import Shapes, Sharding, apply, autocasts, check_operands, infer_gradient_layouts


@autocasts("add")
def add(x: Tensor, y: Tensor, *, alpha: float = 1) -> Tensor:
    """`x + alpha * y`, for residual streams. Unlike the addition of DTensors, `add` never reshards an operand.

    x: any shape. Returns a tensor of this shape.
    y: the shape of x, or x's last dims: learned positions [T, H] are added to x [B, T, H].

    Layouts: the same for x and y, Partial(sum) included. A y with fewer dims is sharded as x is on the dims of y, and
    no Partial is allowed; y's gradient is Partial(sum) on the axes which shard the missing dims. The output has x's
    layout.
    Communication: none.
    Raises LayoutError for other layouts; ValueError for other shapes and dtypes, for tensors on two devices, and for an
    alpha which is no finite number.
    """
    check_operands("add", ("x", "y"), 2, x, y)
    check_number("add", "alpha", alpha)
    if alpha != 1 and not is_int(alpha) and not (_holds_fractions(x) or _holds_fractions(y)):
        raise ValueError(f"add: alpha is {alpha} for tensors of {x.dtype} and {y.dtype}; give an int, or cast x")
    num_missing = x.ndim - y.ndim
    if num_missing < 0 or x.shape[num_missing:] != y.shape:
        raise ValueError(
            f"add takes two tensors of one shape, or y with the last dims of x, got {tuple(x.shape)} and "
            f"{tuple(y.shape)}; exchange or expand them"
        )
    return apply(ADD, x, y, num_missing=num_missing, alpha=alpha)


def _holds_fractions(x: Tensor) -> bool:
    """Whether x holds floating-point or complex numbers, and no ints."""
    return x.is_floating_point() or x.is_complex()


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, y = layouts
    shape, last = shapes
    assert x is not None and y is not None and shape is not None and last is not None, "both are given"
    if options["num_missing"]:
        output = infer.elementwise("add", False, x, y, shapes=(shape, last), operands=("x", "y"))
    else:
        output = infer.elementwise("add", True, x, y, operands=("x", "y"))
    return Sharding(output, shape, infer_gradient_layouts(output, layouts))


def forward(x: Tensor, y: Tensor, *, num_missing: int = 0, alpha: float = 1) -> tuple[Tensor, Tensors]:
    """x + alpha * y, of the shape of x. y lacks the first `num_missing` dims of x; no other dim is broadcast.

    Raises ValueError for any other shapes.
    """
    if x.shape[num_missing:] != y.shape:
        raise ValueError(
            f"add takes, beside x of shape {tuple(x.shape)}, a y of shape {tuple(x.shape[num_missing:])}, got "
            f"{tuple(y.shape)}; expand y"
        )
    return x + y if alpha == 1 else torch.add(x, y, alpha=alpha), ()


def backward(
    saved: Tensors, grad: Tensor, needed: Sequence[bool], *, num_missing: int = 0, alpha: float = 1
) -> Tensors:
    """dx = grad; dy = alpha * grad, summed over the first `num_missing` dims."""
    dy = None if not needed[1] else grad if alpha == 1 else grad * alpha
    if dy is not None and num_missing:
        dy = dy.sum(tuple(range(num_missing)))
    return grad if needed[0] else None, dy


ADD = Op("add", forward, backward, _rule)


@autocasts("sigmoid_gate")
def sigmoid_gate(x: Tensor, score: Tensor) -> Tensor:
    """`x * sigmoid(score)`, for a shared expert's output; score has one number for each row of x.

    x: [..., H]. score: [..., 1]. Returns [..., H].

    Layouts: the same for x and score, with the last dim whole. The output has x's layout.
    Communication: none.
    Raises LayoutError for other layouts; ValueError for other shapes, and for tensors on two devices.
    """
    check_operands("sigmoid_gate", ("x", "score"), 2, x, score)
    if (*x.shape[:-1], 1) != tuple(score.shape) or not x.ndim:
        raise ValueError(
            f"sigmoid_gate takes x [..., H] and a score [..., 1] for each row, got {tuple(x.shape)} and "
            f"{tuple(score.shape)}; give a score of shape {(*x.shape[:-1], 1)}"
        )
    check_floats("sigmoid_gate", ("x", "the score"), x, score)
    return apply(SIGMOID_GATE, x, score)


def _gate_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, score = layouts
    assert x is not None and score is not None and shapes[0] is not None and shapes[1] is not None, "both are given"
    output = infer.elementwise("sigmoid_gate", False, x, score, shapes=(shapes[0], shapes[1]), operands=("x", "score"))
    return Sharding(output, shapes[0], infer_gradient_layouts(output, layouts))


def _gate_forward(x: Tensor, score: Tensor) -> tuple[Tensor, Tensors]:
    """x * sigmoid(score)."""
    return x * torch.sigmoid(score), (x, score)


def gate_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool]) -> Tensors:
    """dx = grad * sigmoid(score); dscore = sum of grad * x over a row, times the sigmoid's derivative."""
    x, score = saved
    assert x is not None and score is not None, "forward saves both"
    gate = torch.sigmoid(score)
    dx = grad * gate if needed[0] else None
    dscore = (grad * x).sum(-1, keepdim=True) * (gate * (1 - gate)) if needed[1] else None
    return dx, dscore


SIGMOID_GATE = Op("sigmoid_gate", _gate_forward, gate_backward, _gate_rule)
