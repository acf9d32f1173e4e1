"""Launches the kernels on tensors of one shape, as a single row where all are contiguous."""

from __future__ import annotations

from torch import Tensor

from ..dispatch.backend import device_of
from ..launching.aot import Variant
from ..launching.launched import contiguous_rows
from . import kernel

# Two 16-byte loads of each operand a thread. Compiled without spills for sm_80 to sm_100 and gfx942; the speed is not
# measured yet.
BYTES_PER_THREAD = 32
WARPS = 4


def _block_of(itemsize: int) -> int:
    """The number of neighbouring elements a program computes, for elements of `itemsize` bytes."""
    return WARPS * 32 * BYTES_PER_THREAD // itemsize


def forward(gate: Tensor, up: Tensor | None, y: Tensor, activation: int) -> None:
    """Writes activation(gate) * up into y, or activation(gate) where up is None."""
    if not y.numel():
        return
    gate, *ups = _rows(gate, *(() if up is None else (up,)))
    up = ups[0] if ups else None
    block = _block_of(y.itemsize)
    with device_of(y):
        kernel.forward[(_programs(gate, block),)](
            gate, up, y, gate.shape[1], gate.stride(0), 0 if up is None else up.stride(0),
            ACTIVATION=activation, BLOCK_I=block, num_warps=WARPS,
        )  # fmt: skip


def backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, dgate: Tensor | None, dup: Tensor | None, activation: int
) -> None:
    """Writes the gradients into dgate and dup; a gradient whose tensor is None is skipped."""
    if not gate.numel():
        return
    grad, gate, *ups = _rows(grad, gate, *(() if up is None else (up,)))
    up = ups[0] if ups else None
    block = _block_of(gate.itemsize)
    with device_of(gate):
        kernel.backward[(_programs(gate, block),)](
            grad, gate, up,
            dgate, dup,
            gate.shape[1], grad.stride(0), gate.stride(0), 0 if up is None else up.stride(0),
            ACTIVATION=activation, BLOCK_I=block, num_warps=WARPS,
        )  # fmt: skip


def _programs(rows: Tensor, block: int) -> int:
    return len(rows) * -(-rows.shape[1] // block)


def _rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape as [N, I] with contiguous rows; N is 1 where all tensors are contiguous."""
    length = tensors[0].shape[-1] if tensors[0].ndim else 1
    if all(each.is_contiguous() for each in tensors):
        length = tensors[0].numel()
    return [contiguous_rows(each, length) for each in tensors]


def _variant(of: str, dtype: str, activation: str, gated: bool) -> Variant:
    function = getattr(kernel, of)
    kinds = dict.fromkeys(("gate_ptr", "y_ptr", "grad_ptr", "dgate_ptr"), f"*{dtype}:16")
    kinds |= dict.fromkeys(("up_ptr", "dup_ptr"), f"*{dtype}:16" if gated else "None")
    kinds |= dict.fromkeys(("I", "stride_gn", "stride_un", "stride_dn"), "i32:16")
    return Variant(
        f"{'swiglu' if gated else 'gelu'}.{of}/{dtype}-{activation.lower()}",
        function,
        {each: kinds[each] for each in function.arg_names if each in kinds},
        {"ACTIVATION": getattr(kernel, activation).value, "BLOCK_I": _block_of(4 if dtype == "fp32" else 2)},
        WARPS,
    )


VARIANTS = (
    *(_variant(of, "bf16", "SILU", gated=True) for of in ("forward", "backward")),
    *(_variant(of, "bf16", "GELU", gated=False) for of in ("forward", "backward")),
    _variant("backward", "fp32", "SILU", gated=True),
    _variant("backward", "bf16", "GELU_TANH", gated=True),
)
