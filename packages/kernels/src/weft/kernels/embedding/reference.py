"""Embedding in plain torch, over the whole table or over one rank's rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def forward(
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
    """Looks up tokens in a table with all rows. Raises as `check_tokens`, called only after torch found a bad token."""
    try:
        return torch.embedding(weight, tokens, -1 if padding_idx is None else padding_idx)
    except IndexError:
        check_tokens(tokens, weight.shape[0])
        raise


def backward(
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
        skipped = -1 if padding_idx is None else padding_idx
        dweight = torch.ops.aten.embedding_dense_backward(wide, tokens, rows, skipped, False)
    else:
        index = tokens - vocab_start
        if padding_idx is not None:
            index = index.masked_fill(tokens == padding_idx, rows)
        index = index.masked_fill(
            (index < 0) | (index >= rows), rows
        )  # tokens of other ranks' rows go to an extra row, skipped
        dweight = torch.ops.aten.embedding_dense_backward(wide, index, rows + 1, rows, False)[:rows]
    found: Tensor = dweight.to(weight.dtype)
    return found


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
