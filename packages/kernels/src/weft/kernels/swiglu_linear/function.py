"""silu(input @ gate_weight.T) * (input @ up_weight.T) of local tensors (Shazeer 2020, eq. 6), forward and backward.

`forward` launches one Triton kernel (`_launch`, the kernel of `matmul`) where `use_triton` and `uses_kernel` hold.
Otherwise `forward`, and `backward` everywhere, call the functions of `matmul` and `swiglu`, which choose their code
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import use_triton
from ..dispatch.op import Tensors
from ..launching.launched import launched
from ..matmul.function import accumulate, linear, multiply, uses_kernel
from ..matmul.reference import flatten_to_rows, restore_leading_dims
from ..swiglu import function as swiglu


def forward(input: Tensor, gate_weight: Tensor, up_weight: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensors]:
    """input [..., K], both weights [M, K] -> [..., M], by one kernel, or by two products and a gate: see `uses_kernel`.

    keep: whether to save tensors for backward: the operands, and the saved tensors of `swiglu` for the two products.
    """
    if not use_triton(input) or not uses_kernel(input, gate_weight.mT, "gated"):
        products = linear(input, gate_weight)[0], linear(input, up_weight)[0]
        if not keep:
            return swiglu.inference(*products), ()
        out, saved = swiglu.forward(*products)
        return out, (input, gate_weight, up_weight, *saved)
    rows, gate, up = flatten_to_rows(input), gate_weight.mT, up_weight.mT
    out = torch.empty((*input.shape[:-1], gate.shape[1]), dtype=input.dtype, device=input.device)
    saved_products = [torch.empty_like(out) if keep else None for _ in range(2)]
    _launch(
        rows,
        *_with_equal_strides(gate, up),
        *(None if each is None else flatten_to_rows(each) for each in (out, *saved_products)),
    )
    return out, (input, gate_weight, up_weight, *saved_products)


def epilogue_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool]) -> Tensors:
    """The gradients of input @ gate_weight.T and input @ up_weight.T, from the output's gradient."""
    return swiglu.backward(saved[3:], grad, (needed[0] or needed[1], needed[0] or needed[2]))


def backward(saved: Tensors, grads: Tensors, needed: Sequence[bool]) -> Tensors:
    """dinput = dgate @ gate_weight + dup @ up_weight; dgate_weight = dgate.T @ input, dup_weight = dup.T @ input.

    grads: (dgate, dup), from `epilogue_backward`.
    """
    input, gate_weight, up_weight = saved[:3]
    assert input is not None and gate_weight is not None and up_weight is not None, "forward saves the operands"
    dgate, dup = (None if each is None else flatten_to_rows(each) for each in grads)
    dinput, rows = None, flatten_to_rows(input)
    if needed[0]:
        assert dgate is not None and dup is not None, "epilogue_backward computes both where dinput is needed"
        dinput = restore_leading_dims(accumulate(dup, up_weight, multiply(dgate, gate_weight)), input)
    return (
        dinput,
        multiply(dgate.mT, rows) if needed[1] and dgate is not None else None,
        multiply(dup.mT, rows) if needed[2] and dup is not None else None,
    )


def _with_equal_strides(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Both weights with equal strides, which the kernel needs: as they are, or as contiguous copies."""
    return (gate, up) if gate.stride() == up.stride() else (gate.contiguous(), up.contiguous())


@launched("swiglu_linear(Tensor x, Tensor gate, Tensor up, Tensor(a!) out, Tensor(b!)? z, Tensor(c!)? z_up)")
def _launch(*arguments: Any) -> None:
    from ..matmul import launch  # imports triton, which a CPU run may not have

    launch.gated(*arguments)
