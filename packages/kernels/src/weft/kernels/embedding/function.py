"""Embedding of local tensors, forward and backward, by the kernels or in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import can_read, use_triton
from ..dispatch.op import Tensors
from ..launching.launched import launched
from . import reference


def forward(
    tokens: Tensor,
    weight: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensors]:
    """Looks up tokens in this rank's rows of the table, as in `reference.forward`. padding_idx matters in backward
    only.

    On a CPU, raises ValueError for a token outside 0 <= token < vocab_size. On a GPU this check would wait for the
    device; there the kernel writes NaN for such a token.
    """
    size = vocab_start + weight.shape[0] if vocab_size is None else vocab_size
    launches = use_triton(weight)
    if can_read(tokens) and (launches or size != weight.shape[0]):
        reference.check_tokens(tokens, size)
    if not launches:
        return reference.forward(tokens, weight, vocab_start=vocab_start, vocab_size=size), (tokens, weight)
    y = torch.empty(*tokens.shape, weight.shape[1], dtype=weight.dtype, device=weight.device)
    _forward(tokens, weight, y, vocab_start, size)
    return y, (tokens, weight)


def backward(
    saved: Tensors,
    grad: Tensor,
    needed: Sequence[bool],
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    padding_idx: int | None = None,
) -> Tensors:
    """The gradient of the weight, as in `reference.backward`."""
    if not needed[1]:
        return None, None
    tokens, weight = saved
    assert tokens is not None and weight is not None, "forward saves both"
    if not use_triton(weight):
        dweight = reference.backward(
            grad, tokens, weight, vocab_start=vocab_start, vocab_size=vocab_size, padding_idx=padding_idx
        )
        return None, dweight
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    _backward(grad, tokens, dweight, vocab_start, -1 if padding_idx is None else padding_idx - vocab_start)
    return None, dweight


@launched("embedding(Tensor tokens, Tensor weight, Tensor(a!) y, SymInt vocab_start, SymInt vocab_size)")
def _forward(*arguments: Any) -> None:
    from . import launch  # imports triton, which a CPU run may not have

    launch.forward(*arguments)


@launched("embedding_backward(Tensor grad, Tensor tokens, Tensor(a!) dweight, SymInt vocab_start, SymInt padding_row)")
def _backward(*arguments: Any) -> None:
    from . import launch

    launch.backward(*arguments)
