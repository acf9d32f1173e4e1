"""linear: input @ weight.T + bias, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from ..op import Tensors


def forward(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, add_bias: bool = True
) -> tuple[Tensor, Tensors]:
    """input [..., K], weight [M, K], bias [M] -> [..., M]; one GEMM.

    add_bias: False leaves the bias out of this rank's output, where the ranks' outputs are summed and another rank
        adds it. The bias' gradient does not change: the sum is linear in the bias, wherever it was added.
    """
    return F.linear(input, weight, bias if add_bias else None), (input, weight)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, add_bias: bool = True) -> Tensors:
    """dinput = grad @ weight, dweight = grad.T @ input, dbias = grad summed over the rows; one GEMM each."""
    input, weight = saved
    assert input is not None and weight is not None, "forward saves both"
    rows = _rows(grad)  # [N, M]
    dinput = _shaped(rows @ weight, input) if needed[0] else None
    dweight = rows.mT @ _rows(input) if needed[1] else None  # [M, K]
    dbias = rows.sum(0) if len(needed) > 2 and needed[2] else None
    return (dinput, dweight, dbias)[: len(needed)]


def _rows(x: Tensor) -> Tensor:
    if x.ndim == 2:
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # the count is spelled out: -1 is ambiguous where x is empty


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """[N, M] -> [..., M], with the leading dims of `like`."""
    return rows if like.ndim == 2 else rows.view(*like.shape[:-1], rows.shape[-1])
