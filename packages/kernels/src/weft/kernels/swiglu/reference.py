"""swiglu and geglu: silu(gate) * up and gelu(gate) * up (Shazeer 2020, eq. 6), in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..backend import is_compiling
from ..op import Tensors

SLOPE, CUBE = 2 * math.sqrt(2 / math.pi), 0.044715  # of gelu's "tanh" form
ELEMENTS_AT_ONCE = 2**18  # 1 MB of float32, what a core's second-level cache holds


def forward(gate: Tensor, up: Tensor, *, activation: str = "silu", keep: bool = False) -> tuple[Tensor, Tensors]:
    """gate and up of one shape -> that shape. activation: "silu", or gelu's `approximate`.

    Saves both, and activation(gate) where `keep` says so: backward takes a quarter longer to compute it again.
    """
    activated = _activated(gate, activation)
    return (activated * up, (gate, up, activated)) if keep else (activated.mul_(up), (gate, up))


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, activation: str = "silu") -> Tensors:
    """dgate = grad * up * the activation's derivative, dup = grad * activation(gate). saved: as of `forward`."""
    gate, up, *kept = saved
    assert gate is not None and up is not None, "forward saves both"
    if kept:
        assert kept[0] is not None, "forward saves it"
        return _derived(grad * up, gate, activation) if needed[0] else None, grad * kept[0] if needed[1] else None
    if activation != "none" and any(needed):
        both = _by_one_sigmoid(gate, up, grad, activation)
        return tuple(each if need else None for each, need in zip(both, needed, strict=True))
    dgate = _derived(grad * up, gate, activation) if needed[0] else None
    return dgate, _activated(gate, activation).mul_(grad) if needed[1] else None


def _by_one_sigmoid(gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> Tensors:
    """Both gradients: torch's own functions would take a sigmoid, or a tanh, for each.

    Of many elements some at once, so that what is read again is still in a cache.
    """
    dgate, dup = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (gate, up))
    operands = gate, up, grad, dgate, dup
    if is_compiling() or gate.numel() <= ELEMENTS_AT_ONCE:
        _into(activation, *operands)
    else:
        for piece in zip(*(torch.split(each.flatten(), ELEMENTS_AT_ONCE) for each in operands), strict=True):
            _into(activation, *piece)
    return dgate, dup


def _into(activation: str, gate: Tensor, up: Tensor, grad: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Writes both gradients. The activation is gate * s with a sigmoid s, its derivative s + w * (1 - s).

    silu: s = sigmoid(gate), w = gate * s. gelu's "tanh" form: s = (1 + tanh(u)) / 2 = sigmoid(2 * u) with
    2 * u = gate * (SLOPE + SLOPE * CUBE * gate**2), w = gate * s * (SLOPE + 3 * SLOPE * CUBE * gate**2).
    """
    wide = torch.promote_types(torch.promote_types(gate.dtype, up.dtype), torch.float32)
    x = gate.to(wide)
    s, activated = (each if each.dtype == wide else torch.empty_like(x) for each in (dgate, dup))
    if activation == "silu":
        torch.sigmoid(x, out=s)
        w = torch.mul(x, s, out=activated)
    else:
        square = x * x
        torch.add(x.new_full((), SLOPE), square, alpha=SLOPE * CUBE, out=s).mul_(x).sigmoid_()
        w = square.mul_(3 * SLOPE * CUBE).add_(SLOPE).mul_(torch.mul(x, s, out=activated))
    s.lerp_(x.new_ones(()), w).mul_(up).mul_(grad)
    activated.mul_(grad)
    for found, gradient in ((s, dgate), (activated, dup)):
        if found is not gradient:
            gradient.copy_(found)


def _activated(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=activation)


def _derived(grad: Tensor, gate: Tensor, activation: str) -> Tensor:
    """The gradient of gate from that of activation(gate)."""
    aten = torch.ops.aten
    dgate: Tensor = (
        aten.silu_backward(grad, gate)
        if activation == "silu"
        else aten.gelu_backward(grad, gate, approximate=activation)
    )
    return dgate
