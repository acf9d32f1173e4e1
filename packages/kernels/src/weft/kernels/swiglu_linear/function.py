"""silu(input @ gate_weight.T) * (input @ up_weight.T) of local tensors (Shazeer 2020, eq. 6), forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, library
from torch.nn import functional as F

from ..backend import use_triton
from ..matmul.function import plain
from ..matmul.reference import rows_of, shaped
from ..op import Tensors
from ..swiglu import reference as swiglu


def forward(input: Tensor, gate_weight: Tensor, up_weight: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensors]:
    """input [..., K], the weights [M, K] -> [..., M].

    keep: whether there is a backward. It needs the operands, and both products: the activation's derivative is computed again.
    """
    rows = rows_of(input)
    if use_triton(input):
        out, *products = _by_kernel(rows, gate_weight, up_weight, keep)
    else:
        gate, up = F.linear(rows, gate_weight), F.linear(rows, up_weight)
        out, products = (F.silu(gate) if keep else F.silu(gate, inplace=True)).mul_(up), [gate, up]
    return shaped(out, input), (input, gate_weight, up_weight, *products)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool]) -> Tensors:
    """dinput = dgate @ gate_weight + dup @ up_weight; dgate_weight = dgate.T @ input, dup_weight = dup.T @ input."""
    input, gate_weight, up_weight, gate, up = saved
    assert input is not None and gate_weight is not None and up_weight is not None, "forward saves them"
    dgate, dup = swiglu.backward((gate, up), rows_of(grad), (needed[0] or needed[1], needed[0] or needed[2]))
    dinput = None
    if needed[0]:
        assert dgate is not None and dup is not None, "both were asked for"
        dinput = shaped(torch.addmm(plain(dgate, gate_weight), dup, up_weight), input)
    rows = rows_of(input)
    return (
        dinput,
        plain(dgate.mT, rows) if needed[1] and dgate is not None else None,
        plain(dup.mT, rows) if needed[2] and dup is not None else None,
    )


@library.custom_op("weft::swiglu_linear", mutates_args=())
def _by_kernel(rows: Tensor, gate_weight: Tensor, up_weight: Tensor, keep: bool) -> list[Tensor]:
    """The output, and both products where `keep`: a node of a graph that is traced."""
    from ..matmul import launch  # imports triton, which a CPU run may not have

    gate, up = gate_weight.mT, up_weight.mT
    if gate.stride() != up.stride():
        gate, up = gate.contiguous(), up.contiguous()
    return [each for each in launch.gated(rows, gate, up, keep=keep) if each is not None]


@_by_kernel.register_fake
def _(rows: Tensor, gate_weight: Tensor, up_weight: Tensor, keep: bool) -> list[Tensor]:
    made = 3 if keep else 1
    return [torch.empty((len(rows), len(gate_weight)), dtype=rows.dtype, device=rows.device) for _ in range(made)]
