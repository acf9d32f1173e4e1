"""The oracle of random numbers: Philox 4x32-10 and what follows from its bits, in numpy's 64-bit integers.

It shares no code with what it judges. `KNOWN_ANSWERS` are those of Random123, the authors' own library.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

KNOWN_ANSWERS = {  # kat_vectors of Random123: (counter, key, answer)
    "zeros": ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    "ones": ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    "pi": (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
}
_LOW = np.uint64(2**32 - 1)
_HIGH = np.uint64(32)


def words(counter: Sequence[np.ndarray], key: Sequence[int]) -> list[np.ndarray]:
    """Four words of 32 bits of the counter, uint64 arrays, and two of the key -> the four words of the block."""
    c = [np.asarray(word, dtype=np.uint64) for word in counter]
    k0, k1 = key
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [p1 >> _HIGH ^ c[1] ^ np.uint64(k0), p1 & _LOW, p0 >> _HIGH ^ c[3] ^ np.uint64(k1), p0 & _LOW]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def bits(index: Tensor, key: int) -> Tensor:
    """Word i % 4 of block i // 4 for each int64 index: int64 of its shape."""
    i = index.numpy().astype(np.uint64)
    block = i >> np.uint64(2)
    none = np.zeros_like(block)
    lanes = np.stack(words([block & _LOW, block >> _HIGH, none, none], (key % 2**32, key >> 32)))
    found = np.take_along_axis(lanes, (i & np.uint64(3)).astype(np.int64)[None], 0)[0]
    return torch.from_numpy(np.ascontiguousarray(found.astype(np.int64))).reshape(index.shape)


def halves(index: Tensor, key: int) -> Tensor:
    """Half i % 8 of block i // 8, the lower of each word first, for each int64 index: int64 of its shape."""
    word = bits(index // 2, key)  # two halves a word, so eight a block
    return torch.where(index % 2 == 0, word % 2**16, word // 2**16)


def kept(index: Tensor, p: float, key: int) -> Tensor:
    """Whether dropout keeps the element of each index."""
    return halves(index, key) >= round(p * 2**16)


def uniform(index: Tensor, key: int) -> Tensor:
    """Float32, exact: the upper 24 bits over 2**24."""
    return (bits(index, key).double() / 2**8).floor().div(2**24).float()


def normal(index: Tensor, key: int) -> Tensor:
    """Float64: cosine and sine by Box and Muller, of each element's own pair of words."""
    even = index - index % 2
    radius = (-2 * ((bits(even, key).double() + 1) / 2**32).log()).sqrt()
    angle = 2 * torch.pi * (bits(even + 1, key).double() / 2**32)
    return radius * torch.where(index % 2 == 0, angle.cos(), angle.sin())


def ulps(found: Tensor, expected: Tensor) -> float:
    """The largest distance of float32 numbers, in units in the last place of the expected ones."""
    assert found.dtype == torch.float32
    if found.numel() == 0:
        return 0.0
    nearest = expected.float()
    above = torch.nextafter(nearest.abs(), torch.tensor(torch.inf))
    return float(((found.double() - expected.double()) / (above - nearest.abs()).double()).abs().max())
