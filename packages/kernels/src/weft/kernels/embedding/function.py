"""Embedding of local tensors, over the whole table or over one rank's rows.

`forward` and `backward` choose the code by `use_triton`. Triton kernels compute on a GPU and in Triton's interpreter.
Plain torch (`plain_forward`, `plain_backward`) computes on a CPU and in float64, and defines the result. `look_up` and
`check_tokens` are plain torch, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dispatch.backend import can_read, use_triton
from ..dispatch.op import Tensors
from ..launching.launched import launched


def forward(
    tokens: Tensor,
    weight: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensors]:
    """Looks up tokens in this rank's rows of the table, as in `plain_forward`. padding_idx matters in backward
    only.

    On a CPU, raises ValueError for a token outside 0 <= token < vocab_size. On a GPU this check would wait for the
    device; there the kernel writes NaN for such a token.
    """
    size = vocab_start + weight.shape[0] if vocab_size is None else vocab_size
    launches = use_triton(weight)
    if can_read(tokens) and (launches or size != weight.shape[0]):
        check_tokens(tokens, size)
    if not launches:
        return plain_forward(tokens, weight, vocab_start=vocab_start, vocab_size=size), (tokens, weight)
    y = torch.empty(*tokens.shape, weight.shape[1], dtype=weight.dtype, device=weight.device)
    _launch_forward(tokens, weight, y, vocab_start, size)
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
    """The gradient of the weight, as in `plain_backward`."""
    if not needed[1]:
        return None, None
    tokens, weight = saved
    assert tokens is not None and weight is not None, "forward saves both"
    if not use_triton(weight):
        dweight = plain_backward(
            grad, tokens, weight, vocab_start=vocab_start, vocab_size=vocab_size, padding_idx=padding_idx
        )
        return None, dweight
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    _launch_backward(grad, tokens, dweight, vocab_start, -1 if padding_idx is None else padding_idx - vocab_start)
    return None, dweight


@launched("embedding(Tensor tokens, Tensor weight, Tensor(a!) y, SymInt vocab_start, SymInt vocab_size)")
def _launch_forward(*arguments: Any) -> None:
    from . import launch  # imports triton, which a CPU run may not have

    launch.forward(*arguments)


@launched("embedding_backward(Tensor grad, Tensor tokens, Tensor(a!) dweight, SymInt vocab_start, SymInt padding_row)")
def _launch_backward(*arguments: Any) -> None:
    from . import launch

    launch.backward(*arguments)


def plain_forward(
    tokens: Tensor,
    weight: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    """tokens [...] of ints, weight [V_local, H] -> [..., H].

    weight: rows vocab_start to vocab_start + V_local of a table of vocab_size rows. vocab_size None: these are the
        last. A token whose row is on another rank gives zeros, so the sum over the ranks is the lookup in the whole
        table.
    """
    rows = weight.shape[0]
    size = vocab_start + rows if vocab_size is None else vocab_size
    if rows == size:
        return look_up(tokens, weight)
    if rows == 0:
        return weight.new_zeros(*tokens.shape, weight.shape[1])
    index = tokens - vocab_start
    outside = (index < 0) | (index >= rows)
    output = F.embedding(index.masked_fill(outside, 0), weight)
    return output.masked_fill_(outside.unsqueeze(-1), 0)


def look_up(tokens: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Looks up tokens in a table with all rows.

    Raises ValueError as `check_tokens`, which is called only after torch found a bad token.
    """
    try:
        return torch.embedding(weight, tokens, -1 if padding_idx is None else padding_idx)
    except (IndexError, RuntimeError):  # a RuntimeError for a table without rows
        check_tokens(tokens, weight.shape[0])
        raise


def plain_backward(
    grad: Tensor,
    tokens: Tensor,
    weight: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """dweight[v] = the sum of grad over the positions of token v, in float32 at least and in a fixed order.

    The gradient of row padding_idx is 0.
    """
    rows = weight.shape[0]
    size = vocab_start + rows if vocab_size is None else vocab_size
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    # torch's embedding backward sorts the tokens on CUDA, so it is deterministic; index_add_ is not.
    if rows == size:
        skipped_row = -1 if padding_idx is None else padding_idx
        dweight = torch.ops.aten.embedding_dense_backward(wide, tokens, rows, skipped_row, False)
    else:
        index = tokens - vocab_start
        if padding_idx is not None:
            index = index.masked_fill(tokens == padding_idx, rows)
        # Tokens of other ranks' rows go to an extra row, which is skipped.
        index = index.masked_fill((index < 0) | (index >= rows), rows)
        dweight = torch.ops.aten.embedding_dense_backward(wide, index, rows + 1, rows, False)[:rows]
    rounded: Tensor = dweight.to(weight.dtype)
    return rounded


def check_tokens(tokens: Tensor, size: int) -> None:
    """Raises ValueError for a token outside 0 <= token < size."""
    if tokens.numel() == 0:
        return
    low, high = (each.item() for each in tokens.aminmax())
    if low >= 0 and high < size:
        return
    position = ((tokens < 0) | (tokens >= size)).nonzero()[0].tolist()
    raise ValueError(
        f"tokens{position} is {int(tokens[tuple(position)])}, outside the table of {size} rows; "
        f"tokens must be 0 to {size - 1}: check the tokenizer against vocab_size"
    )
