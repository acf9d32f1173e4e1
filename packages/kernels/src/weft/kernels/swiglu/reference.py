"""swiglu and geglu: silu(gate) * up and gelu(gate) * up (Shazeer 2020, eq. 6), in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..op import Tensors


def forward(gate: Tensor, up: Tensor, *, activation: str = "silu") -> Tensor:
    """gate and up of one shape -> that shape. activation: "silu", or gelu's `approximate`."""
    return _activated(gate, activation).mul_(up)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, activation: str = "silu") -> Tensors:
    """dgate = grad * up * the activation's derivative, dup = grad * activation(gate). saved: gate and up."""
    gate, up = saved
    assert gate is not None and up is not None, "forward saves both"
    dgate = None
    if needed[0] and activation == "silu":  # grad * up * s * (1 + gate * (1 - s)) with s = sigmoid(gate), in one pass
        dgate = torch.ops.aten.silu_backward(grad * up, gate)
    elif needed[0]:
        dgate = torch.ops.aten.gelu_backward(grad * up, gate, approximate=activation)
    dup = _activated(gate, activation).mul_(grad) if needed[1] else None
    return dgate, dup


def _activated(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=activation)
