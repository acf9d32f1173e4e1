"""activation(gate) * up, or an activation alone, of local tensors, forward and backward: by the kernels or torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch import backend
from ..dispatch.op import Tensors
from ..launching.launched import launched
from . import reference

ACTIVATIONS = {"silu": 0, "none": 1, "tanh": 2}  # the kernel's numbers; gelu by its `approximate` option


def forward(gate: Tensor, up: Tensor, *, activation: str = "silu") -> tuple[Tensor, Tensors]:
    """activation(gate) * up, and the saved tensors: gate, up and, for float32 and float64 on a CPU, activation(gate).

    Elsewhere backward recomputes the activation.
    """
    if backend.use_triton(gate) and gate.dtype == up.dtype:
        return activated(gate, up, activation), (gate, up)
    return reference.forward(gate, up, activation=activation, keep=_saves_activation(gate, up))


def inference(gate: Tensor, up: Tensor, *, activation: str = "silu") -> Tensor:
    """The output of `forward`, without saved tensors."""
    if backend.use_triton(gate) and gate.dtype == up.dtype:
        return activated(gate, up, activation)
    return reference.forward(gate, up, activation=activation)[0]


def native(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor | None:
    """activation(gate) * up by torch's functions and with torch's gradients, where `is_torchs` allows; else None."""
    if not backend.is_torchs(gate, up) or gate.shape != up.shape:
        return None
    return reference.forward(gate, up, activation=activation, keep=True)[0]


def _saves_activation(gate: Tensor, up: Tensor) -> bool:
    """Whether `forward` saves activation(gate) for backward: eager, on a CPU, with 32 bits or more and equal dtypes.

    Under torch.compile the compiler decides what backward recomputes.
    """
    return gate.dtype == up.dtype and not (backend.is_short_of_memory(gate) or backend.is_compiling())


def again(saved: Tensors, *, activation: str = "silu") -> Tensor:
    """Recomputes the output of `forward` from its saved tensors."""
    gate, up = saved[:2]
    assert gate is not None and up is not None, "forward saves both"
    return inference(gate, up, activation=activation)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, activation: str = "silu") -> Tensors:
    """The gradients of gate and up, as in `reference.backward`."""
    gate, up = saved[:2]
    assert gate is not None and up is not None, "forward saves both"
    if backend.use_triton(gate) and gate.dtype == up.dtype:
        return gradients(grad, gate, up, needed, activation)
    return reference.backward(saved, grad, needed, activation=activation)


def activated(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """activation(gate) * up by the kernel, or activation(gate) where up is None."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _forward(gate, up, y, ACTIVATIONS[activation])
    return y


def gradients(grad: Tensor, gate: Tensor, up: Tensor | None, needed: Sequence[bool], activation: str) -> Tensors:
    """The gradients of gate and up by the kernel, or of gate only where up is None."""
    made = [torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if need else None for need in needed]
    dgate, dup = made if up is not None else (*made, None)
    _backward(grad, gate, up, dgate, dup, ACTIVATIONS[activation])
    return tuple(made)


@launched("gate(Tensor gate, Tensor? up, Tensor(a!) y, int activation)")
def _forward(*arguments: Any) -> None:
    from . import launch  # imports triton, which a CPU run may not have

    launch.forward(*arguments)


@launched("gate_backward(Tensor grad, Tensor gate, Tensor? up, Tensor(a!)? dgate, Tensor(b!)? dup, int activation)")
def _backward(*arguments: Any) -> None:
    from . import launch

    launch.backward(*arguments)
