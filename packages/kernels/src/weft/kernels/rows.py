"""Tiles of rows that are read once: how many rows and warps a program has, and which view of a tensor has such rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Of a row that is in registers between its one reading and its writing. Longer ones would spill, and take the torch path.
LONGEST_BYTES = 32 * 1024
MOST_WARPS = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of a program, the power of two at or above a row's length, and how many warps share them."""

    rows: int
    block: int
    warps: int

    @classmethod
    def of(cls, length: int, elements: int) -> Tile:
        """For rows of this length, with so many elements a thread where that takes no more than MOST_WARPS."""
        block = max(16, 1 << (length - 1).bit_length())
        warps = min(MOST_WARPS, max(1, block // (32 * elements)))
        return cls(max(1, 32 * elements // block), block, warps)


def fits(x: Tensor, length: int) -> bool:
    """Whether a row of so many elements of x is one tile."""
    return 0 < length * x.itemsize <= LONGEST_BYTES


def rows_of(x: Tensor, length: int) -> Tensor:
    """x as [N, length], each row contiguous: a view wherever one stride reaches every row, otherwise a copy."""
    rows = x.reshape(x.numel() // max(1, length), length)
    return rows if rows.stride(-1) == 1 or length < 2 else rows.contiguous()


def vector_of(weight: Tensor | None) -> Tensor | None:
    """A weight or bias [H] whose elements are neighbours in memory, as kernels read it."""
    return None if weight is None else weight.contiguous()


def programs_of(tensor: Tensor, tiles: int, warps: int, at_work: int) -> int:
    """How many programs take all tiles in turn: as many as are at work at once, `at_work` warps on each multiprocessor.

    In the interpreter a few, so that one has several tiles. At least one: what it writes is there without rows too.
    """
    if tensor.is_cuda:
        multiprocessors = torch.cuda.get_device_properties(tensor.device).multi_processor_count
        return max(1, min(tiles, multiprocessors * max(1, at_work // warps)))
    return max(1, min(tiles, 3))
