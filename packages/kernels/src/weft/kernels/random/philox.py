"""Random numbers as a function of (key, global element index): Philox 4x32-10 (Salmon et al. 2011, section 4).

Nothing is drawn in order and no state is kept: a rank computes the numbers of its own elements, and whatever the mesh
is they are the same. Of blocks with n lanes, the four words or their eight halves, element i reads lane i % n of the block
whose counter is i // n. This is plain torch; `kernel` says the same to Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .part import Part

# The multipliers and key increments of Philox 4x32, and its rounds (the paper's table 2).
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW32 = 0xFFFFFFFF
# At once for each of torch's threads, which take no less: the few tensors of so many, 0.25 MB each, fit in a CPU's second-level
# cache. It bounds the scratch memory.
_BLOCKS_A_THREAD = 2**15

WORDS, HALVES = 4, 8  # lanes of a block: of 32 bits, or of 16

Words = tuple[Tensor, Tensor, Tensor, Tensor]  # of blocks: int64 [...], each of 32 bits
Word = Tensor | int  # of counters, and of what becomes of them: an int where it is the same in all
Transform = Callable[[Words], Tensor]  # to numbers [..., lanes]


def check_key(key: int) -> None:
    """Raises ValueError for a key that is no int of 64 bits."""
    if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 2**64:
        raise ValueError(f"a key is an int of 64 bits, got {key!r}; make it with weft.mesh.derive_key")


def as_uniform(words: Words) -> Tensor:
    """Float32 in 0 <= u < 1: the upper 24 bits."""
    return torch.stack([word >> 8 for word in words], -1).to(torch.float32) * 2.0**-24


def as_normal(words: Words) -> Tensor:
    """Standard normal float32, by Box and Muller's transform.

    Elements 2j and 2j + 1 are the cosine and the sine of one pair. Computed in float64, so that devices, whose
    functions differ in the last place, round to the same float32 but in rare cases.
    """
    uniforms, angles = (torch.stack(of_pairs, -1).to(torch.float64) for of_pairs in (words[0::2], words[1::2]))
    radius = ((uniforms + 1) * 2.0**-32).log_().mul_(-2).sqrt_()  # of a uniform in 0 < u <= 1; [..., 2]
    angle = angles * (2 * math.pi * 2.0**-32)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).to(torch.float32).flatten(-2)  # [..., 4]


def as_halves(words: Words) -> Tensor:
    """The 16 bits of each lane, the lower half of a word before the upper, less 2**15: int16 [..., 8], ordered as the bits are."""
    narrow = torch.empty(*words[0].shape, WORDS, dtype=torch.int32, device=words[0].device)
    for lane, word in enumerate(words):
        narrow.select(-1, lane).copy_(word)  # its lower 32 bits; hosts and GPUs are little-endian
    return narrow.view(torch.int16).bitwise_xor_(-(2**15))


def fill(out: Tensor, part: Part, key: int, transform: Transform, lanes: int = WORDS) -> None:
    """Writes the numbers of the elements of `part` into `out`: contiguous, of as many elements, of any dtype.

    lanes: of a block, WORDS or HALVES, as `transform` makes numbers of it.
    Computed in pieces, so the scratch memory does not grow with `out`; at most one block for each element, and where
    runs of neighbours are long one for as many as it has lanes.
    """
    # Nothing to write, or nowhere: hundreds of operations are saved in a step that is recorded.
    if part.numel == 0 or out.is_meta:
        return
    runs = part.runs()
    length = runs.sizes[-1]
    rows = out.view(-1, length)  # one run each
    # A multiple of the lanes, so that a run is cut between blocks.
    at_once = _BLOCKS_A_THREAD * torch.get_num_threads() * lanes
    rows_at_once = max(1, at_once // (length + 2 * (lanes - 1)))  # blocks hold elements beyond both ends of a run
    # Where all runs start at one lane the numbers are a slice of their blocks.
    lane = runs.offset % lanes if all(stride % lanes == 0 for stride in runs.strides[:-1]) else None
    last = runs.offset + sum((size - 1) * stride for size, stride in zip(runs.sizes, runs.strides, strict=True))
    is_far = last >= lanes * 2**32
    for row, first in product(range(0, len(rows), rows_at_once), range(0, length, at_once)):
        piece = rows[row : row + rows_at_once, first : first + at_once]
        starts = _starts(runs, row, len(piece), out.device) + first
        piece.copy_(_draw(starts, piece.shape[1], lane, key, transform, lanes, is_far))


def _starts(runs: Part, first: int, count: int, device: torch.device) -> Tensor:
    """Index of the first element of each of `count` runs, from run `first` on: int64 [count]."""
    row = torch.arange(first, first + count, device=device)
    starts = torch.full_like(row, runs.offset)
    for size, stride in zip(runs.sizes[-2::-1], runs.strides[-2::-1], strict=True):
        starts += (row % size).mul_(stride)
        row //= size
    return starts


def _draw(
    starts: Tensor, length: int, lane: int | None, key: int, transform: Transform, lanes: int, is_far: bool
) -> Tensor:
    """The numbers of `length` elements from each start: [runs, length].

    lane: that of every start, or None where they differ. is_far: whether counters may have more than 32 bits.
    """
    groups = (length + (lanes - 1 if lane is None else lane) + lanes - 1) // lanes  # blocks that hold a run
    counter = (starts // lanes).unsqueeze(1) + torch.arange(groups, device=starts.device)  # [runs, groups]
    words = _blocks((counter & _LOW32, counter >> 32, 0, 0) if is_far else (counter, 0, 0, 0), key)
    numbers = transform(words).flatten(1)  # [runs, lanes * groups]
    if lane is not None:
        return numbers[:, lane : lane + length]
    return numbers.gather(1, (starts % lanes).unsqueeze(1) + torch.arange(length, device=starts.device))


def _blocks(counter: tuple[Tensor, Word, Word, Word], key: int) -> Words:
    """The blocks of the counters. In place, theirs too, in five tensors that stay in a CPU's caches.

    int64 holds the 64 bits of a product of 32 by 32 in two's complement. Its upper half is shifted down with copies of the sign above
    it, and exclusive-ored with all of another product; what is above 32 bits then is cleared.
    """
    c0: Word
    c0, c1, c2, c3 = counter
    k0, k1 = key & _LOW32, key >> 32
    free: list[Tensor] = []
    for _ in range(_ROUNDS):
        c0 *= _MULTIPLIERS[0]
        c2 *= _MULTIPLIERS[1]
        c0, c1, c2, c3 = _mixed(c2, c1, k0, free), c2, _mixed(c0, c3, k1, free), c0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW32, (k1 + _KEY_STEPS[1]) & _LOW32
    words: Any = (c0, c1, c2, c3)  # after two rounds all are tensors
    w0, w1, w2, w3 = (word.bitwise_and_(_LOW32) for word in words)
    return w0, w1, w2, w3


def _mixed(product: Word, other: Word, key: int, free: list[Tensor]) -> Word:
    """The upper 32 bits of the product, exclusive-ored with the lower 32 of `other` and with the key.

    free: tensors that may be written; `other` is one afterwards, if it is a tensor.
    """
    if isinstance(product, int):
        mask = product >> 32 ^ key
        return (other & _LOW32) ^ mask if isinstance(other, int) else other.bitwise_xor_(mask).bitwise_and_(_LOW32)
    mixed = torch.bitwise_right_shift(product, 32, out=free.pop() if free else None)
    if isinstance(other, int):
        mixed.bitwise_xor_((other & _LOW32) ^ key)
    else:
        mixed.bitwise_xor_(other).bitwise_xor_(key)
        free.append(other)
    return mixed.bitwise_and_(_LOW32)
