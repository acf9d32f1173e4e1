"""Oracle of random numbers: Philox 4x32-10 and the distributions made from its bits, in numpy's 64-bit integers.

Shares no code with the kernels under test. `KNOWN_ANSWERS` come from Random123, the library of Philox's authors.
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
    """The four words of a counter's block, as uint64 arrays.

    counter: four words, as uint64 arrays. key: two words. All words have 32 bits.
    """
    c = [np.asarray(word, dtype=np.uint64) for word in counter]
    k0, k1 = key
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [p1 >> _HIGH ^ c[1] ^ np.uint64(k0), p1 & _LOW, p0 >> _HIGH ^ c[3] ^ np.uint64(k1), p0 & _LOW]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def bits(index: Tensor, key: int) -> Tensor:
    """Word i % 4 of block i // 4 for each index i; int64, in the shape of `index`."""
    i = index.numpy().astype(np.uint64)
    block = i >> np.uint64(2)
    none = np.zeros_like(block)
    lanes = np.stack(words([block & _LOW, block >> _HIGH, none, none], (key % 2**32, key >> 32)))
    found = np.take_along_axis(lanes, (i & np.uint64(3)).astype(np.int64)[None], 0)[0]
    return torch.from_numpy(np.ascontiguousarray(found.astype(np.int64))).reshape(index.shape)


def halves(index: Tensor, key: int) -> Tensor:
    """Half-word i % 8 of block i // 8 for each index i; int64, in the shape of `index`.

    The lower half of each word comes first.
    """
    word = bits(index // 2, key)  # eight halves in a block of four words
    return torch.where(index % 2 == 0, word % 2**16, word // 2**16)


def kept(index: Tensor, p: float, key: int) -> Tensor:
    """Whether dropout keeps the element at each index. p: the probability to drop an element."""
    return halves(index, key) >= round(p * 2**16)


def uniform(index: Tensor, key: int) -> Tensor:
    """Float32 numbers, exact: the upper 24 bits of each word over 2**24."""
    return (bits(index, key).double() / 2**8).floor().div(2**24).float()


def normal(index: Tensor, key: int) -> Tensor:
    """Float64 numbers by Box and Muller: the cosine at even indices, the sine at odd ones, of a pair of words."""
    even = index - index % 2
    radius = (-2 * ((bits(even, key).double() + 1) / 2**32).log()).sqrt()
    angle = 2 * torch.pi * (bits(even + 1, key).double() / 2**32)
    return radius * torch.where(index % 2 == 0, angle.cos(), angle.sin())


def ulps(found: Tensor, expected: Tensor) -> float:
    """The largest error of float32 numbers, in units in the last place of the expected numbers."""
    assert found.dtype == torch.float32
    if found.numel() == 0:
        return 0.0
    nearest = expected.float()
    above = torch.nextafter(nearest.abs(), torch.tensor(torch.inf))
    return float(((found.double() - expected.double()) / (above - nearest.abs()).double()).abs().max())
