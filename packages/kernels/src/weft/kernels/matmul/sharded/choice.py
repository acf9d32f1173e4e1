"""Which products run in steps, which overlap communication: where steps were faster than a collective and a product."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.reshard import layout_of

from ...dispatch import backend
from ...launching.launched import TableRow

TABLE = Path(__file__).parent.with_name("in_steps.json")  # written by benchmarks/tune_in_steps.py
OverlappedOp = Literal["all_gather_matmul", "matmul_reduce_scatter"]


class ShardedProduct(NamedTuple):
    """A class of products which share a measurement: a key of the table."""

    form: OverlappedOp
    chip: str  # as "sm_90", or "cpu"
    dtype: str
    ranks: int  # the size of the axis over which the product communicates
    # The sizes of the rows of all ranks, [m, k], and of the weight, [n, k], rounded up to powers of two.
    m: int
    n: int
    k: int

    @classmethod
    def of(
        cls, form: OverlappedOp, chip: str, dtype: torch.dtype, ranks: int, M: int, N: int, K: int
    ) -> ShardedProduct:
        m, n, k = (1 << max(0, size - 1).bit_length() for size in (M, N, K))
        return cls(form, chip, str(dtype).removeprefix("torch."), ranks, m, n, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing(TableRow):
    """A row of the table: the measured times of forward and backward for a class of products."""

    of: ShardedProduct  # the timed products
    seconds: float  # in steps
    pair_seconds: float  # the collective and the product in sequence
    where: str  # the device, and the version of torch


MEASURED = Timing.read(TABLE)


def faster_in_steps(form: OverlappedOp, a: DTensor, weight: Tensor, axis: str) -> bool:
    """Whether the product of a [..., K] and weight [N, K] was measured faster in steps; False without a measurement.

    axis: the axis of a's mesh over which the rows of a are gathered, or the output's rows scattered. Every rank of
    the axis gets the same answer.
    """
    layout = layout_of(a)
    ranks = layout.mesh.axis_size(axis)
    parts = math.prod(layout.parts(dim) for dim in range(a.ndim - 1))
    M = math.prod(a.shape[:-1]) // (parts // ranks if form == "all_gather_matmul" else parts)
    row = MEASURED.get(ShardedProduct.of(form, chip_name(a.device), a.dtype, ranks, M, *weight.shape))
    return row is not None and row.seconds < row.pair_seconds


def chip_name(device: torch.device) -> str:
    """`ShardedProduct.chip` of a device."""
    return backend.chip_of(device)[0] if device.type == "cuda" else device.type
