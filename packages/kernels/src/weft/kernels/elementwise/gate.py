"""sigmoid_gate on plain tensors and DTensors, and its local computation: plain torch on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from weft.mesh import Layout, infer

from ..dispatch.op import Op, Tensors
from ..dispatch.sharded import Shapes, Sharding, apply, autocasts, check_devices, infer_gradient_layouts


@autocasts("sigmoid_gate")
def sigmoid_gate(x: Tensor, score: Tensor) -> Tensor:
    """`x * sigmoid(score)`, for a shared expert's output; score has one number for each row of x.

    x: [..., H]. score: [..., 1]. Returns [..., H].

    Layouts: the same for x and score, with the last dim whole. The output has x's layout.
    Communication: none.
    Raises LayoutError for other layouts; ValueError for other shapes, and for tensors on two devices.
    """
    if (*x.shape[:-1], 1) != tuple(score.shape) or not x.ndim:
        raise ValueError(
            f"sigmoid_gate takes x [..., H] and a score [..., 1] for each row, got {tuple(x.shape)} and "
            f"{tuple(score.shape)}; give a score of shape {(*x.shape[:-1], 1)}"
        )
    check_devices("sigmoid_gate", x, score)
    return apply(SIGMOID_GATE, x, score)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, score = layouts
    assert x is not None and score is not None and shapes[0] is not None and shapes[1] is not None, "both are given"
    output = infer.elementwise("sigmoid_gate", False, x, score, shapes=(shapes[0], shapes[1]), operands=("x", "score"))
    return Sharding(output, shapes[0], infer_gradient_layouts(output, layouts))


def forward(x: Tensor, score: Tensor) -> tuple[Tensor, Tensors]:
    """x * sigmoid(score)."""
    return x * torch.sigmoid(score), (x, score)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool]) -> Tensors:
    """dx = grad * sigmoid(score); dscore = sum of grad * x over a row, times the sigmoid's derivative."""
    x, score = saved
    assert x is not None and score is not None, "forward saves both"
    gate = torch.sigmoid(score)
    dx = grad * gate if needed[0] else None
    dscore = (grad * x).sum(-1, keepdim=True) * (gate * (1 - gate)) if needed[1] else None
    return dx, dscore


SIGMOID_GATE = Op("sigmoid_gate", forward, backward, _rule)
