"""swiglu: silu(gate) * up (Shazeer 2020, eq. 6), in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..op import Tensors


def forward(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensors]:
    """gate and up of one shape -> that shape. Saves the two alone: silu(gate) is computed again in backward."""
    return F.silu(gate).mul_(up), (gate, up)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool]) -> Tensors:
    """dgate = grad * up * s * (1 + gate * (1 - s)) with s = sigmoid(gate), dup = grad * silu(gate)."""
    gate, up = saved
    assert gate is not None and up is not None, "forward saves both"
    # aten's silu_backward is that formula in one pass.
    dgate = torch.ops.aten.silu_backward(grad * up, gate) if needed[0] else None
    dup = F.silu(gate).mul_(grad) if needed[1] else None
    return dgate, dup
