"""swiglu and geglu: silu(gate) * up and gelu(gate) * up (Shazeer 2020, eq. 6), in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..op import Tensors

SLOPE, CUBE = 2 * math.sqrt(2 / math.pi), 0.044715  # of gelu's "tanh" form


def forward(gate: Tensor, up: Tensor, *, activation: str = "silu") -> Tensor:
    """gate and up of one shape -> that shape. activation: "silu", or gelu's `approximate`."""
    return _activated(gate, activation).mul_(up)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, activation: str = "silu") -> Tensors:
    """dgate = grad * up * the activation's derivative, dup = grad * activation(gate). saved: gate and up."""
    gate, up = saved
    assert gate is not None and up is not None, "forward saves both"
    if activation == "tanh" and all(needed):
        return _tanh_gradients(gate, up, grad)
    dgate = None
    if needed[0] and activation == "silu":  # grad * up * s * (1 + gate * (1 - s)) with s = sigmoid(gate), in one pass
        dgate = torch.ops.aten.silu_backward(grad * up, gate)
    elif needed[0]:
        dgate = torch.ops.aten.gelu_backward(grad * up, gate, approximate=activation)
    dup = _activated(gate, activation).mul_(grad) if needed[1] else None
    return dgate, dup


def _tanh_gradients(gate: Tensor, up: Tensor, grad: Tensor) -> Tensors:
    """Both, by one sigmoid s for the activation gate * s and its derivative: of aten's tanh each takes as long as the rest together.

    s = (1 + tanh(u)) / 2 = sigmoid(2 * u), and 2 * u = gate * (SLOPE + SLOPE * CUBE * gate**2).
    """
    x = gate.to(torch.promote_types(gate.dtype, torch.float32))
    square = x * x
    s = (square * (SLOPE * CUBE)).add_(SLOPE).mul_(x).sigmoid_()
    activated = x * s
    slope = (1 - s).mul_(activated).mul_(square.mul_(3 * SLOPE * CUBE).add_(SLOPE)).add_(s)
    return slope.mul_(grad).mul_(up).to(gate.dtype), activated.mul_(grad).to(up.dtype)


def _activated(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=activation)
