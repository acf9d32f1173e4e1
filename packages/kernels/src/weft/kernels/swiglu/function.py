"""activation(gate) * up, or an activation alone, of local tensors: SwiGLU, GeGLU (Shazeer 2020, eq. 6), SiLU and GELU.

`forward`, `inference`, `recompute` and `backward` choose the code by `use_triton`. Triton kernels (`kernel_forward`,
`kernel_backward`, also for an activation alone) compute on a GPU and in Triton's interpreter. Plain torch
(`plain_forward`, `plain_backward`) computes on a CPU, in float64, and where gate and up differ in dtype; it defines
the result. `gelu_forward` and the functions beside it do the same for GELU, x * Phi(x), where Phi is the normal
distribution function (Hendrycks and Gimpel 2016).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dispatch import backend
from ..dispatch.backend import runs_natively, use_triton
from ..dispatch.op import Tensors
from ..launching.launched import launched

# The kernel's number of each activation: silu, and gelu under the names of its `approximate` option.
ACTIVATIONS = {"silu": 0, "none": 1, "tanh": 2}
SLOPE, CUBE = 2 * math.sqrt(2 / math.pi), 0.044715  # constants of gelu's "tanh" form
ELEMENTS_AT_ONCE = 2**18  # 1 MB of float32, the size of a core's second-level cache


def forward(gate: Tensor, up: Tensor, *, activation: str = "silu") -> tuple[Tensor, Tensors]:
    """activation(gate) * up, and the saved tensors: gate, up and, for float32 and float64 on a CPU, activation(gate).

    Elsewhere backward recomputes the activation.
    """
    if backend.use_triton(gate) and gate.dtype == up.dtype:
        return kernel_forward(gate, up, activation), (gate, up)
    return plain_forward(gate, up, activation=activation, keep=_saves_activation(gate, up))


def inference(gate: Tensor, up: Tensor, *, activation: str = "silu") -> Tensor:
    """The output of `forward`, without saved tensors."""
    if backend.use_triton(gate) and gate.dtype == up.dtype:
        return kernel_forward(gate, up, activation)
    return plain_forward(gate, up, activation=activation)[0]


def native(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor | None:
    """activation(gate) * up by torch's functions with torch's gradients, where `runs_natively` allows; else None.

    `swiglu` and `geglu` call this first: on small CPU tensors, an `Op` would take longer than the computation.
    """
    if up is None or not backend.runs_natively(gate, up) or gate.shape != up.shape:
        return None
    return plain_forward(gate, up, activation=activation, keep=True)[0]


def _saves_activation(gate: Tensor, up: Tensor) -> bool:
    """Whether `forward` saves activation(gate) for backward: only for float32 or float64 on a CPU, both of one dtype.

    Never under torch.compile, where the compiler decides what backward recomputes.
    """
    return gate.dtype == up.dtype and not (backend.is_short_of_memory(gate) or backend.is_compiling())


def recompute(saved: Tensors, *, activation: str = "silu") -> Tensor:
    """Recomputes the output of `forward` from its saved tensors."""
    gate, up = saved[:2]
    assert gate is not None and up is not None, "forward saves both"
    return inference(gate, up, activation=activation)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, activation: str = "silu") -> Tensors:
    """The gradients of gate and up, as in `plain_backward`."""
    gate, up = saved[:2]
    assert gate is not None and up is not None, "forward saves both"
    if backend.use_triton(gate) and gate.dtype == up.dtype:
        return kernel_backward(grad, gate, up, needed, activation)
    return plain_backward(saved, grad, needed, activation=activation)


def kernel_forward(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """activation(gate) * up by the kernel, or activation(gate) where up is None."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch_forward(gate, up, y, ACTIVATIONS[activation])
    return y


def kernel_backward(grad: Tensor, gate: Tensor, up: Tensor | None, needed: Sequence[bool], activation: str) -> Tensors:
    """The gradients of gate and up by the kernel, or of gate only where up is None."""
    grads = [torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if need else None for need in needed]
    dgate, dup = grads if up is not None else (*grads, None)
    _launch_backward(grad, gate, up, dgate, dup, ACTIVATIONS[activation])
    return tuple(grads)


@launched("gate(Tensor gate, Tensor? up, Tensor(a!) y, int activation)")
def _launch_forward(*arguments: Any) -> None:
    from . import launch  # imports triton, which a CPU run may not have

    launch.forward(*arguments)


@launched("gate_backward(Tensor grad, Tensor gate, Tensor? up, Tensor(a!)? dgate, Tensor(b!)? dup, int activation)")
def _launch_backward(*arguments: Any) -> None:
    from . import launch

    launch.backward(*arguments)


def plain_forward(gate: Tensor, up: Tensor, *, activation: str = "silu", keep: bool = False) -> tuple[Tensor, Tensors]:
    """activation(gate) * up, and the saved tensors: gate, up and, with `keep`, activation(gate).

    gate and up have one shape. activation: "silu", or the `approximate` option of gelu.
    Without `keep`, plain_backward recomputes the activation, which takes a quarter longer.
    """
    output = _plain_activation(gate, activation)  # activation(gate)
    return (output * up, (gate, up, output)) if keep else (output.mul_(up), (gate, up))


def plain_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, activation: str = "silu") -> Tensors:
    """dgate = grad * up * activation'(gate), dup = grad * activation(gate). saved: as `plain_forward` saves."""
    gate, up, *saved_activation = saved
    assert gate is not None and up is not None, "forward saves both"
    if saved_activation:
        assert saved_activation[0] is not None, "forward saves the activation"
        return (
            _multiply_by_derivative(grad * up, gate, activation) if needed[0] else None,
            grad * saved_activation[0] if needed[1] else None,
        )
    if activation != "none" and any(needed):
        both = _compute_by_one_sigmoid(gate, up, grad, activation)
        return tuple(each if need else None for each, need in zip(both, needed, strict=True))
    dgate = _multiply_by_derivative(grad * up, gate, activation) if needed[0] else None
    return dgate, _plain_activation(gate, activation).mul_(grad) if needed[1] else None


def _compute_by_one_sigmoid(gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> Tensors:
    """dgate and dup with one sigmoid for both; torch's own functions would compute a sigmoid or tanh for each.

    Large tensors are computed in pieces, so intermediate values are still in a cache when they are read again.
    """
    dgate, dup = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (gate, up))
    operands = gate, up, grad, dgate, dup
    if backend.is_compiling() or backend.is_shape_alone(gate) or gate.numel() <= ELEMENTS_AT_ONCE:
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
    s, activation_of_gate = (each if each.dtype == wide else torch.empty_like(x) for each in (dgate, dup))
    if activation == "silu":
        torch.sigmoid(x, out=s)
        w = torch.mul(x, s, out=activation_of_gate)
    else:
        square = x * x
        torch.add(x.new_full((), SLOPE), square, alpha=SLOPE * CUBE, out=s).mul_(x).sigmoid_()
        w = square.mul_(3 * SLOPE * CUBE).add_(SLOPE).mul_(torch.mul(x, s, out=activation_of_gate))
    s.lerp_(x.new_ones(()), w).mul_(up).mul_(grad)
    activation_of_gate.mul_(grad)
    for result, gradient in ((s, dgate), (activation_of_gate, dup)):
        if result is not gradient:
            gradient.copy_(result)


def _plain_activation(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=activation)


def _multiply_by_derivative(grad: Tensor, gate: Tensor, activation: str) -> Tensor:
    """The gradient of gate: grad, the gradient of activation(gate), times activation'(gate)."""
    aten = torch.ops.aten
    dgate: Tensor = (
        aten.silu_backward(grad, gate)
        if activation == "silu"
        else aten.gelu_backward(grad, gate, approximate=activation)
    )
    return dgate


def gelu_forward(x: Tensor, *, approximate: str = "none") -> tuple[Tensor, Tensors]:
    """gelu(x), and the saved tensors: x."""
    y = kernel_forward(x, None, approximate) if use_triton(x) else plain_gelu_forward(x, approximate=approximate)
    return y, (x,)


def gelu_native(x: Tensor, approximate: str) -> Tensor | None:
    """gelu(x) by torch's function with torch's own gradient, where `runs_natively` allows; None elsewhere."""
    return plain_gelu_forward(x, approximate=approximate) if runs_natively(x) else None


def gelu_recompute(saved: Tensors, *, approximate: str = "none") -> Tensor:
    """Recomputes the output of `gelu_forward` from its saved tensors."""
    (x,) = saved
    assert x is not None, "forward saves x"
    return gelu_forward(x, approximate=approximate)[0]


def gelu_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, approximate: str = "none") -> Tensors:
    """The gradient of x, as in `plain_gelu_backward`."""
    (x,) = saved
    assert x is not None, "forward saves x"
    if use_triton(x):
        return kernel_backward(grad, x, None, needed, approximate)
    return (plain_gelu_backward(grad, x, approximate=approximate) if needed[0] else None,)


def plain_gelu_forward(x: Tensor, *, approximate: str = "none") -> Tensor:
    """gelu(x), of x's shape. approximate: "none", or "tanh" for the form in section 2 of the paper, as GPT-2 uses."""
    return F.gelu(x, approximate=approximate)


def plain_gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """dx = grad * (Phi(x) + x * phi(x)), or the tanh form's derivative; one pass, by aten's gelu_backward."""
    dx: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    return dx
