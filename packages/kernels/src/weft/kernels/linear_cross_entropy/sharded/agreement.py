"""The checks of `vocab_parallel_linear_cross_entropy` before the ranks gather the tokens' statistics.

Each rank checks the local operands. Then an all-gather compares the ranks' sizes and tells all ranks of a failure.
Otherwise, after a failure of a single rank, the remaining ranks would wait forever in the gathers of the statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from weft.mesh.extension import chunk

from ...cross_entropy.options import Options, check
from ...cross_entropy.sharded.gather import ShardClasses, check_gathered, run_or_report
from ..function import cast_form, check_factors, cut_chunks
from ..gradients import Wanted

Result = TypeVar("Result")


class AgreedSizes(NamedTuple):
    """The numbers which decide how often the ranks gather, and how many bytes. Must be equal on all ranks."""

    tokens: int = 0
    chunk: int = 0  # tokens of a chunk
    token_bytes: int = 0  # bytes of a token's statistics


def classes_of(linear_weight: Tensor, vocab_start: int, vocab_size: int) -> ShardClasses:
    """This rank's classes, for `compare_sizes`. The weight is not checked yet: a scalar counts as no classes."""
    return ShardClasses(vocab_start, linear_weight.shape[0] if linear_weight.ndim else 0, vocab_size)


def sizes_of(
    input: Tensor,
    target: Tensor,
    dtype: torch.dtype,
    wanted: Wanted,
    chunk_tokens: int | None,
    vocab_size: int,
    shards: int,
    options: Options,
) -> AgreedSizes:
    """The sizes of this rank. dtype: of the GEMMs. shards: number of ranks that share the vocabulary."""
    # Two buffers of logits: the statistics of a part of a chunk are gathered during the GEMM of the next part.
    chunks, _ = cut_chunks(input, target, dtype, wanted, chunk_tokens, vocab_size, shards, 2)
    wide = torch.promote_types(dtype, torch.float32)
    return AgreedSizes(target.numel(), chunks[0].stop if chunks else 0, options.columns * wide.itemsize)


def check_sizes(ranks: Sequence[int], sizes: list[list[float]]) -> None:
    """Raise ValueError if the ranks' sizes differ. sizes: [ranks, 3]."""
    tokens, chunks, token_bytes = (_list_values(ranks, column) for column in zip(*sizes, strict=True))
    if len(tokens) > 1:
        raise ValueError(
            f"the ranks have different numbers of tokens: {', '.join(tokens)}; give every rank of the group the same "
            f"target"
        )
    if len(token_bytes) > 1:
        raise ValueError(
            f"the ranks gather different numbers of bytes for a token: {', '.join(token_bytes)}; give every rank of "
            f"the group the same label_smoothing, return_token_accuracy and compute_dtype, and input of the same dtype"
        )
    if len(chunks) > 1:
        raise ValueError(
            f"the ranks take different numbers of tokens at a time: {', '.join(chunks)}; give every rank of the group "
            f"the same chunk_tokens, and weights whose gradients have the same dtype"
        )


def _list_values(ranks: Sequence[int], values: Iterable[float]) -> list[str]:
    """Each distinct value with a rank which has the value, as "4 on rank 0". A single entry if all ranks agree."""
    rank_of = {int(value): rank for rank, value in zip(ranks, values, strict=True)}
    return [f"{value} on rank {rank}" for value, rank in rank_of.items()]


def _check_part(input: Tensor, target: Tensor, rank: int, ranks: int, sequence_parallel: bool) -> None:
    """Raise ValueError unless the input has the target's tokens; with sequence_parallel, this rank's part of these."""
    shape = list(target.shape)
    if sequence_parallel:
        if target.ndim == 0:
            raise ValueError("sequence_parallel cuts dim 0 of the tokens; target has no dims")
        start, stop = chunk(target.shape[0], ranks, rank)
        shape[0] = stop - start
    if list(input.shape[:-1]) != shape:
        part = ", this rank's part of dim 0" if sequence_parallel else ""
        raise ValueError(
            f"input of shape {tuple(input.shape)} for a target of shape {tuple(target.shape)}; give "
            f"[{', '.join(map(str, shape))}, H]{part}"
        )


def check_and_size(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    denominator: Tensor | None,
    *,
    options: Options,
    classes: ShardClasses,
    wanted: Wanted,
    chunk_tokens: int | None,
    compute_dtype: torch.dtype | None,
    rank: int,
    ranks: int,
    sequence_parallel: bool,
) -> AgreedSizes:
    """Check this rank's arguments, and return its sizes; called in `attempt` of `compare_sizes`.

    Raises ValueError for arguments which do not fit together.
    """
    _check_part(input, target, rank, ranks, sequence_parallel)
    form = replace(cast_form(input, compute_dtype), shape=(*target.shape, *input.shape[-1:]))
    check_factors(form, linear_weight, linear_bias, chunk_tokens, compute_dtype)
    logits = replace(form, shape=(*target.shape, linear_weight.shape[0]))
    check(logits, target, weight, denominator, options, classes.start, classes.vocab_size)
    return sizes_of(input, target, form.dtype, wanted, chunk_tokens, classes.vocab_size, ranks, options)


def compare_sizes(
    attempt: Callable[[], tuple[Result, AgreedSizes]],
    group: dist.ProcessGroup,
    classes: ShardClasses,
    device: torch.device,
) -> tuple[Result, Tensor]:
    """Call `attempt` and compare the ranks' sizes. Returns the result of `attempt`, and a scalar to add to the loss.

    The scalar is 0, or NaN if the sizes differ. The NaN is for calls in which the host does not read the sizes: on a
    GPU, `check_gathered` reads sizes only once for each value.
    attempt: returns a result and this rank's sizes, or raises.
    Communication: an all-gather of 36 bytes per rank, also if a rank has failed.
    Raises the error of `attempt`; ValueError if another rank has failed, or if the host reads the sizes and finds a
    difference.
    """
    (result, sizes), gather = run_or_report(attempt, group, classes, lambda: _row(AgreedSizes(), device))
    gathered = gather(_row(sizes, device))()[:, 0]  # [ranks, 3]
    ranks = dist.get_process_group_ranks(group)
    check_gathered((group, classes, sizes), gathered, lambda: check_sizes(ranks, gathered.tolist()))
    return result, torch.where((gathered == gathered[0]).all(), gathered.new_zeros(()), torch.nan)


def _row(sizes: AgreedSizes, device: torch.device) -> Tensor:
    """The sizes as a tensor [1, 3], made without a copy from the host, for which the host would wait."""
    return torch.cat([torch.full((1,), size, dtype=torch.float32, device=device) for size in sizes]).unsqueeze(0)
