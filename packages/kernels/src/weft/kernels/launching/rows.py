"""Tiles for kernels which read each row once: rows and warps of a program, and views of tensors as rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The longest row in bytes. A program holds rows in registers from load to store; longer rows would spill, and are
# computed in plain torch.
LONGEST_BYTES = 32 * 1024
MOST_WARPS = 16


def block_length(length: int) -> int:
    """A block's length: `length` rounded up to a power of two, at least 16 for tensor cores."""
    return max(16, 1 << (length - 1).bit_length())


@dataclass(frozen=True, slots=True)
class RowTile:
    """How many rows a program computes, and with how many warps. `RowTile.of` chooses both for a row length."""

    rows: int  # of a program
    block: int  # the row length, rounded up to a power of two of 16 or more
    warps: int  # of a program, shared by the rows

    @classmethod
    def of(cls, length: int, elements: int) -> RowTile:
        """The tile for rows of `length` elements, with `elements` in each thread unless more than MOST_WARPS result."""
        block = block_length(length)
        warps = min(MOST_WARPS, max(1, block // (32 * elements)))
        return cls(max(1, 32 * elements // block), block, warps)


def fits(x: Tensor, length: int) -> bool:
    """Whether a row of `length` elements of x's dtype fits into a tile."""
    return 0 < length * x.itemsize <= LONGEST_BYTES


def contiguous_rows(x: Tensor, length: int) -> Tensor:
    """x as [N, length] with contiguous rows: a view if a single stride reaches every row, otherwise a copy."""
    rows = x.reshape(x.numel() // max(1, length), length)
    return rows if rows.stride(-1) == 1 or length < 2 else rows.contiguous()


def vector_of(weight: Tensor | None) -> Tensor | None:
    """A weight or bias [H] made contiguous for a kernel; None stays None."""
    return None if weight is None else weight.contiguous()


def programs_of(tensor: Tensor, tiles: int, warps: int, at_work: int) -> int:
    """The number of programs to launch for `tiles` tiles: as many as run at once on the GPU. Programs loop over tiles.

    tensor: for the device. warps: of a program. at_work: how many warps to run at once on each multiprocessor.
    At least 1 even without tiles, because a program also writes outputs of fixed shape. In Triton's interpreter at
    most 3, so that a program has several tiles.
    """
    if tensor.is_cuda:
        multiprocessors = torch.cuda.get_device_properties(tensor.device).multi_processor_count
        return max(1, min(tiles, multiprocessors * max(1, at_work // warps)))
    return max(1, min(tiles, 3))
