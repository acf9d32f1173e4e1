"""Random numbers as a function of (key, global element index): Philox 4x32-10 (Salmon et al. 2011, section 4).

There is no state and no order of drawing: a rank computes the numbers of its own elements, and the numbers are the
same on every mesh. `Part` gives the row-major indices of the elements of a box of a global tensor. A block has n lanes,
its four words or their eight halves; element i reads lane i % n of the block with counter i // n. This module is plain
torch; `kernel` is the same in Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..dispatch.arguments import described

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a global tensor: element (i0, i1, ...) of the box has the row-major index offset + sum(i * strides).

    Tells a rank which random numbers to draw. An index has up to 62 bits. An empty box has a size of 0.
    """

    offset: int
    sizes: Ints
    strides: Ints

    @classmethod
    def of(cls, shape: Sequence[int], slices: Sequence[slice] | None = None) -> Part:
        """The box `slices` of a tensor of `shape`, with start and stop for each dim; None means the whole tensor.

        Raises ValueError for a shape of more than 2**62 elements.
        """
        if math.prod(shape) > 2**62:
            raise ValueError(f"a tensor of shape {tuple(shape)} has more than 2**62 elements; draw it in parts")
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        if slices is None:
            return cls(0, tuple(shape), strides)
        offset = sum(part.start * stride for part, stride in zip(slices, strides, strict=True))
        return cls(offset, tuple(part.stop - part.start for part in slices), strides)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def at(self, i: int) -> Part:
        """The sub-box at index `i` of the first dim, without this dim."""
        return Part(self.offset + i * self.strides[0], self.sizes[1:], self.strides[1:])

    def runs(self) -> Part:
        """The same elements in the same order, in as few dims as possible; the last dim has stride 1: a run."""
        return Part(self.offset, *merge(self.sizes, self.strides))


@lru_cache(maxsize=4096)
def merge(sizes: Ints, strides: Ints, *more_strides: Ints) -> tuple[Ints, ...]:
    """Return (sizes, strides, *more_strides) of the same elements in as few dims as possible; the last stride is 1.

    more_strides: further strides of the same dims, such as a tensor's strides in memory. Two dims are merged only where
        all strides allow it.
    """
    if 0 in sizes:
        return ((0,), *((1,) for _ in (strides, *more_strides)))
    dims: list[Ints] = []  # (size, stride, *more_strides)
    for size, *steps in zip(sizes, strides, *more_strides, strict=True):
        if size == 1:
            continue  # the stride of a dim of size 1 does not matter
        if dims and all(outer == size * step for outer, step in zip(dims[-1][1:], steps, strict=True)):
            dims[-1] = (dims[-1][0] * size, *steps)
        else:
            dims.append((size, *steps))
    if not dims or dims[-1][1] != 1:  # runs have one element
        dims.append((1,) * (2 + len(more_strides)))
    return tuple(zip(*dims, strict=True))


# The multipliers, key increments and rounds of Philox 4x32 (the paper's table 2).
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW32 = 0xFFFFFFFF
# Blocks computed at a time, for each of torch's threads: the smallest work torch gives a thread. The few tensors of
# this size, 0.25 MB each, fit in a CPU's second-level cache. This bounds the scratch memory.
_BLOCKS_A_THREAD = 2**15

WORDS, HALVES = 4, 8  # the lanes of a block: 4 of 32 bits, or 8 of 16 bits

Words = tuple[Tensor, Tensor, Tensor, Tensor]  # the four words of blocks: int64 [...], with values of 32 bits
Word = Tensor | int  # a word during the rounds: an int where it is the same in all blocks
Transform = Callable[[Words], Tensor]  # words [...] -> numbers [..., lanes]


def check_key(op: str, option: str, key: object) -> int:
    """The key. Raises ValueError unless it is an int of 64 bits. op, option: for the message."""
    if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 2**64:
        raise ValueError(
            f"{op}: {option} is an int of 64 bits, got {described(key)}; make it with weft.mesh.derive_key"
        )
    return key


def as_uniform(words: Words) -> Tensor:
    """The upper 24 bits of each word as a float32 in 0 <= u < 1: words [...] -> [..., 4]."""
    return torch.stack([word >> 8 for word in words], -1).to(torch.float32) * 2.0**-24


def as_normal(words: Words) -> Tensor:
    """Standard normal float32 numbers by the Box-Muller transform: words [...] -> [..., 4].

    Elements 2j and 2j + 1 are the cosine and the sine of one pair. Computed in float64, because log and cos differ in
    the last place between devices: two float64 results that differ so almost always round to the same float32.
    """
    uniforms, angles = (torch.stack(pairs, -1).to(torch.float64) for pairs in (words[0::2], words[1::2]))
    # sqrt(-2 log u) with u uniform in 0 < u <= 1: [..., 2]
    radius = ((uniforms + 1) * 2.0**-32).log_().mul_(-2).sqrt_()
    angle = angles * (2 * math.pi * 2.0**-32)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).to(torch.float32).flatten(-2)  # [..., 4]


def as_halves(words: Words) -> Tensor:
    """The 16-bit halves of the words, minus 2**15: int16 [..., 8], the lower half of a word first.

    Subtracting 2**15 makes the order of the signed numbers the order of the unsigned bits.
    """
    words_32 = torch.empty(*words[0].shape, WORDS, dtype=torch.int32, device=words[0].device)
    for lane, word in enumerate(words):
        words_32.select(-1, lane).copy_(word)  # the lower 32 bits; hosts and GPUs are little-endian
    return words_32.view(torch.int16).bitwise_xor_(-(2**15))


def fill(out: Tensor, part: Part, key: int, transform: Transform, lanes: int = WORDS) -> None:
    """Writes the random numbers of the elements of `part` into `out`.

    out: contiguous, of any dtype, with as many elements as the part. transform: from words to numbers.
    lanes: how many numbers `transform` makes of a block, WORDS or HALVES.

    Computed in pieces, so the scratch memory does not grow with `out`. Long runs need one block for `lanes` elements;
    runs of one element need a block each.
    """
    # With no data to write, skip the hundreds of operations below, which would slow the recording of a step.
    if part.numel == 0 or out.is_meta:
        return
    runs = part.runs()
    length = runs.sizes[-1]
    rows = out.view(-1, length)  # [runs, length]
    # A multiple of the lanes, to split runs between blocks.
    at_once = _BLOCKS_A_THREAD * torch.get_num_threads() * lanes
    rows_at_once = max(1, at_once // (length + 2 * (lanes - 1)))  # the first and last block may reach beyond the run
    # Where all runs start at the same lane, their numbers are a slice of the blocks' numbers.
    lane = runs.offset % lanes if all(stride % lanes == 0 for stride in runs.strides[:-1]) else None
    last = runs.offset + sum((size - 1) * stride for size, stride in zip(runs.sizes, runs.strides, strict=True))
    is_far = last >= lanes * 2**32
    for row, first in product(range(0, len(rows), rows_at_once), range(0, length, at_once)):
        piece = rows[row : row + rows_at_once, first : first + at_once]
        starts = _starts(runs, row, len(piece), out.device) + first
        piece.copy_(_draw(starts, piece.shape[1], lane, key, transform, lanes, is_far))


def _starts(runs: Part, first: int, count: int, device: torch.device) -> Tensor:
    """The global index of the first element of `count` runs, from run `first` onward: int64 [count]."""
    row = torch.arange(first, first + count, device=device)
    starts = torch.full_like(row, runs.offset)
    for size, stride in zip(runs.sizes[-2::-1], runs.strides[-2::-1], strict=True):
        starts += (row % size).mul_(stride)
        row //= size
    return starts


def _draw(
    starts: Tensor, length: int, lane: int | None, key: int, transform: Transform, lanes: int, is_far: bool
) -> Tensor:
    """The numbers of `length` consecutive elements from each start: [runs, length].

    lane: the lane of every start, or None where the starts differ. is_far: whether counters may have more than 32 bits.
    """
    groups = (length + (lanes - 1 if lane is None else lane) + lanes - 1) // lanes  # blocks of a run
    counter = (starts // lanes).unsqueeze(1) + torch.arange(groups, device=starts.device)  # [runs, groups]
    words = _blocks((counter & _LOW32, counter >> 32, 0, 0) if is_far else (counter, 0, 0, 0), key)
    numbers = transform(words).flatten(1)  # [runs, lanes * groups]
    if lane is not None:
        return numbers[:, lane : lane + length]
    return numbers.gather(1, (starts % lanes).unsqueeze(1) + torch.arange(length, device=starts.device))


def _blocks(counter: tuple[Tensor, Word, Word, Word], key: int) -> Words:
    """The Philox words of the counters. Computed in place, counters included, in five tensors which fit a CPU's caches.

    A product of two 32-bit words is held as the 64 bits of an int64. Shifting its upper half down fills the upper
    bits with copies of the sign, and the exclusive-or with a full product adds further upper bits; `_mix` clears
    all of them.
    """
    c0: Word
    c0, c1, c2, c3 = counter
    k0, k1 = key & _LOW32, key >> 32
    free: list[Tensor] = []
    for _ in range(_ROUNDS):
        c0 *= _MULTIPLIERS[0]
        c2 *= _MULTIPLIERS[1]
        c0, c1, c2, c3 = _mix(c2, c1, k0, free), c2, _mix(c0, c3, k1, free), c0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW32, (k1 + _KEY_STEPS[1]) & _LOW32
    words: Any = (c0, c1, c2, c3)  # after two rounds every word is a tensor
    w0, w1, w2, w3 = (word.bitwise_and_(_LOW32) for word in words)
    return w0, w1, w2, w3


def _mix(product: Word, word: Word, key: int, free: list[Tensor]) -> Word:
    """The upper 32 bits of `product`, exclusive-ored with the lower 32 bits of `word` and with the key.

    free: tensors which may be overwritten. If `word` is a tensor, it becomes the result or is added to `free`.
    """
    if isinstance(product, int):
        mask = product >> 32 ^ key
        return (word & _LOW32) ^ mask if isinstance(word, int) else word.bitwise_xor_(mask).bitwise_and_(_LOW32)
    mixed = torch.bitwise_right_shift(product, 32, out=free.pop() if free else None)
    if isinstance(word, int):
        mixed.bitwise_xor_((word & _LOW32) ^ key)
    else:
        mixed.bitwise_xor_(word).bitwise_xor_(key)
        free.append(word)
    return mixed.bitwise_and_(_LOW32)
