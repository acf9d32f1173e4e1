"""SwiGLU and GeGLU in plain torch: silu(gate) * up and gelu(gate) * up (Shazeer 2020, eq. 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dispatch.backend import is_compiling
from ..dispatch.op import Tensors

SLOPE, CUBE = 2 * math.sqrt(2 / math.pi), 0.044715  # constants of gelu's "tanh" form
ELEMENTS_AT_ONCE = 2**18  # 1 MB of float32, the size of a core's second-level cache


def forward(gate: Tensor, up: Tensor, *, activation: str = "silu", keep: bool = False) -> tuple[Tensor, Tensors]:
    """activation(gate) * up, and the saved tensors: gate, up and, with `keep`, activation(gate).

    gate and up have one shape. activation: "silu", or the `approximate` option of gelu.
    Without `keep`, backward recomputes the activation, which takes a quarter longer.
    """
    activated = _activated(gate, activation)
    return (activated * up, (gate, up, activated)) if keep else (activated.mul_(up), (gate, up))


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, activation: str = "silu") -> Tensors:
    """dgate = grad * up * activation'(gate), dup = grad * activation(gate). saved: the saved tensors of `forward`."""
    gate, up, *saved_activation = saved
    assert gate is not None and up is not None, "forward saves both"
    if saved_activation:
        assert saved_activation[0] is not None, "forward saves the activation"
        return _through_activation(grad * up, gate, activation) if needed[0] else None, grad * saved_activation[
            0
        ] if needed[1] else None
    if activation != "none" and any(needed):
        both = _by_one_sigmoid(gate, up, grad, activation)
        return tuple(each if need else None for each, need in zip(both, needed, strict=True))
    dgate = _through_activation(grad * up, gate, activation) if needed[0] else None
    return dgate, _activated(gate, activation).mul_(grad) if needed[1] else None


def _by_one_sigmoid(gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> Tensors:
    """dgate and dup with one sigmoid for both; torch's own functions would compute a sigmoid or tanh for each.

    Large tensors are computed in pieces, so intermediate values are still in a cache when they are read again.
    """
    dgate, dup = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (gate, up))
    operands = gate, up, grad, dgate, dup
    if is_compiling() or gate.numel() <= ELEMENTS_AT_ONCE:
        _write_gradients(activation, *operands)
    else:
        for piece in zip(*(torch.split(each.flatten(), ELEMENTS_AT_ONCE) for each in operands), strict=True):
            _write_gradients(activation, *piece)
    return dgate, dup


def _write_gradients(activation: str, gate: Tensor, up: Tensor, grad: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Writes dgate and dup. The activation is gate * s with a sigmoid s; its derivative is s + w * (1 - s).

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


def _through_activation(grad: Tensor, gate: Tensor, activation: str) -> Tensor:
    """The gradient of gate: grad, the gradient of activation(gate), times activation'(gate)."""
    aten = torch.ops.aten
    dgate: Tensor = (
        aten.silu_backward(grad, gate)
        if activation == "silu"
        else aten.gelu_backward(grad, gate, approximate=activation)
    )
    return dgate
