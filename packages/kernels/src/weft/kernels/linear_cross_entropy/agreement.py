"""What the ranks of a group agree on before the first chunk: one gather of 36 bytes, whatever is wrong with one of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..cross_entropy.gathers import Classes, look_once, starting_checked, values_on_ranks
from ..cross_entropy.options import Options
from .chunks import chunks_of


class Sizes(NamedTuple):
    """What decides how much is gathered how often, and must be the same on every rank."""

    tokens: int = 0
    chunk: int = 0
    token_bytes: int = 0


def sizes_of(
    input: Tensor, target: Tensor, chunk_tokens: int | None, vocab_size: int, shards: int, options: Options
) -> Sizes:
    chunks = chunks_of(target.numel(), chunk_tokens, -(-vocab_size // shards), 2, input)
    wide = torch.promote_types(input.dtype, torch.float32)
    return Sizes(target.numel(), chunks[0].stop if chunks else 0, (4 if options.label_smoothing else 3) * wide.itemsize)


def agreed_by(
    group: dist.ProcessGroup, held: Classes, sizes: Sizes, failed: Exception | None, device: torch.device
) -> Tensor:
    """0 where the ranks agree, otherwise NaN; raises as `starting_checked`, and where the sizes differ."""
    row = torch.cat([torch.full((1,), size, dtype=torch.float32, device=device) for size in sizes])  # by no copy
    told = starting_checked(group, held, failed)(row.unsqueeze(0))()[:, 0]  # [ranks, 3]
    look_once((group, held, sizes), told, lambda: _check_sizes(group, told.tolist()))
    return torch.where((told == told[0]).all(), 0.0, torch.nan)


def _check_sizes(group: dist.ProcessGroup, told: list[list[float]]) -> None:
    tokens, chunks, token_bytes = (values_on_ranks(group, column) for column in zip(*told, strict=True))
    if len(tokens) > 1:
        raise ValueError(
            f"the ranks have different numbers of tokens: {', '.join(tokens)}; give every rank of the group the same target"
        )
    if len(token_bytes) > 1:
        raise ValueError(
            f"the ranks gather different numbers of bytes for a token: {', '.join(token_bytes)}; give every rank of the "
            f"group the same label_smoothing, and input of the same dtype"
        )
    if len(chunks) > 1:
        raise ValueError(
            f"the ranks take different numbers of tokens at a time: {', '.join(chunks)}; give every rank of the group the "
            f"same chunk_tokens"
        )
