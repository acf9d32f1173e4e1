"""The sizes that must be the same on all ranks of a group before they gather a chunk at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cross_entropy.agreement import Classes, values_on_ranks
from ..cross_entropy.options import Options
from .function import chunked
from .gradients import Wanted


class Sizes(NamedTuple):
    """They decide how many bytes are gathered, and how often.

    token_bytes: of one token's statistics.
    """

    tokens: int = 0
    chunk: int = 0
    token_bytes: int = 0


def classes_of(linear_weight: Tensor, vocab_start: int, vocab_size: int) -> Classes:
    """The classes of a rank's weight, which need not be a valid one."""
    return Classes(vocab_start, linear_weight.shape[0] if linear_weight.ndim else 0, vocab_size)


def sizes_of(
    input: Tensor,
    target: Tensor,
    dtype: torch.dtype,
    wanted: Wanted,
    chunk_tokens: int | None,
    vocab_size: int,
    shards: int,
    options: Options,
) -> Sizes:
    """dtype: of the logits."""
    chunks = chunked(input, target, dtype, wanted, chunk_tokens, vocab_size, shards, 2)
    wide = torch.promote_types(dtype, torch.float32)
    return Sizes(target.numel(), chunks[0].stop if chunks else 0, options.columns * wide.itemsize)


def check_sizes(ranks: Sequence[int], sizes: list[list[float]]) -> None:
    """Raises ValueError where the ranks' sizes differ. sizes: [ranks, 3]."""
    tokens, chunks, token_bytes = (values_on_ranks(ranks, column) for column in zip(*sizes, strict=True))
    if len(tokens) > 1:
        raise ValueError(
            f"the ranks have different numbers of tokens: {', '.join(tokens)}; give every rank of the group the same target"
        )
    if len(token_bytes) > 1:
        raise ValueError(
            f"the ranks gather different numbers of bytes for a token: {', '.join(token_bytes)}; give every rank of the "
            f"group the same label_smoothing, return_token_accuracy and compute_dtype, and input of the same dtype"
        )
    if len(chunks) > 1:
        raise ValueError(
            f"the ranks take different numbers of tokens at a time: {', '.join(chunks)}; give every rank of the group the "
            f"same chunk_tokens, and weights whose gradients have the same dtype"
        )
