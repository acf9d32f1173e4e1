"""Random numbers as a function of (key, global element index): Philox 4x32-10 (Salmon et al. 2011, section 4).

Nothing is drawn in order and no state is kept: a rank computes the numbers of its own elements, and whatever the mesh
is they are the same. Element i reads lane i % 4 of the block whose counter is i // 4. This is plain torch; `kernel` says
the same to Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from .part import Part

# The multipliers and key increments of Philox 4x32, and its rounds (the paper's table 2).
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW32 = 0xFFFFFFFF
# A multiple of 4, so that a run is cut between blocks. It bounds the scratch memory, and keeps it in a CPU's
# second-level cache: 0.5 MB a tensor of counters.
_ELEMENTS_AT_ONCE = 2**18

Transform = Callable[[Tensor], Tensor]  # from blocks of bits to numbers, int64 [..., 4] -> [..., 4]


def check_key(key: int) -> None:
    """Raises ValueError for a key that is no int of 64 bits."""
    if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 2**64:
        raise ValueError(f"a key is an int of 64 bits, got {key!r}; make it with weft.mesh.derive_key")


def as_uniform(block: Tensor) -> Tensor:
    """Float32 in 0 <= u < 1: the upper 24 bits."""
    return (block >> 8).to(torch.float32) * 2.0**-24


def as_normal(block: Tensor) -> Tensor:
    """Standard normal float32, by Box and Muller's transform.

    Elements 2j and 2j + 1 are the cosine and the sine of one pair. Computed in float64, so that devices, whose
    functions differ in the last place, round to the same float32 but in rare cases.
    """
    wide = block.to(torch.float64)
    radius = ((wide[..., 0::2] + 1) * 2.0**-32).log_().mul_(-2).sqrt_()  # of a uniform in 0 < u <= 1; [..., 2]
    angle = wide[..., 1::2] * (2 * math.pi * 2.0**-32)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).to(torch.float32).flatten(-2)  # [..., 4]


def fill(out: Tensor, part: Part, key: int, transform: Transform) -> None:
    """Writes the numbers of the elements of `part` into `out`: contiguous, of as many elements, of any dtype.

    Computed in pieces, so the scratch memory does not grow with `out`; at most one block for each element, and where
    runs of neighbours are long a block for four.
    """
    if (
        part.numel == 0 or out.is_meta
    ):  # nothing to write, or nowhere: hundreds of operations are saved where a step is recorded
        return
    runs = part.runs()
    length = runs.sizes[-1]
    rows = out.view(-1, length)  # one run each
    rows_at_once = max(1, _ELEMENTS_AT_ONCE // (length + 6))  # blocks hold up to 3 more elements at each end of a run
    # Where all runs start at one lane the numbers are a slice of their blocks.
    lane = runs.offset % 4 if all(stride % 4 == 0 for stride in runs.strides[:-1]) else None
    for row, first in product(range(0, len(rows), rows_at_once), range(0, length, _ELEMENTS_AT_ONCE)):
        piece = rows[row : row + rows_at_once, first : first + _ELEMENTS_AT_ONCE]
        starts = _starts(runs, row, len(piece), out.device) + first
        piece.copy_(_draw(starts, piece.shape[1], lane, key, transform))


def _starts(runs: Part, first: int, count: int, device: torch.device) -> Tensor:
    """Index of the first element of each of `count` runs, from run `first` on: int64 [count]."""
    row = torch.arange(first, first + count, device=device)
    starts = torch.full_like(row, runs.offset)
    for size, stride in zip(runs.sizes[-2::-1], runs.strides[-2::-1], strict=True):
        starts += (row % size).mul_(stride)
        row //= size
    return starts


def _draw(starts: Tensor, length: int, lane: int | None, key: int, transform: Transform) -> Tensor:
    """The numbers of `length` elements from each start: [runs, length].

    lane: that of every start, or None where they differ.
    """
    groups = (length + (3 if lane is None else lane) + 3) // 4  # blocks that hold a run
    counter = (starts >> 2).unsqueeze(1) + torch.arange(groups, device=starts.device)  # [runs, groups]
    numbers = transform(_blocks(counter, torch.zeros_like(counter), key)).flatten(1)  # [runs, 4 * groups]
    if lane is not None:
        return numbers[:, lane : lane + length]
    return numbers.gather(1, (starts & 3).unsqueeze(1) + torch.arange(length, device=starts.device))


def _blocks(low: Tensor, high: Tensor, key: int) -> Tensor:
    """The counters' lower and upper 64 bits, int64 [...] each -> [..., 4] of 32 bits each."""
    c0, c1, c2, c3 = (part & _LOW32 for part in (low, low >> 32, high, high >> 32))
    k0, k1 = key & _LOW32, key >> 32
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1.bitwise_xor_(c1).bitwise_xor_(k0), low1, high0.bitwise_xor_(c3).bitwise_xor_(k1), low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW32, (k1 + _KEY_STEPS[1]) & _LOW32
    return torch.stack((c0, c1, c2, c3), -1)


def _multiply(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of x * constant, both of 32 bits; constant >= 2**31."""
    product = x * (constant - 2**32)  # above -2**63, so exact; short of the wanted one by x * 2**32
    return (product >> 32).add_(x), product.bitwise_and_(_LOW32)
