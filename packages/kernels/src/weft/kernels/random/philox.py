"""Random numbers as a function of (key, global element index): Philox 4x32-10 (Salmon et al. 2011, section 4).

Nothing is drawn in order and no state is kept: a rank computes the numbers of its own elements, and whatever the mesh
is they are the same. Element i reads lane i % 4 of the block whose counter is i // 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# The multipliers and key increments of Philox 4x32, and its rounds (the paper's table 2).
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW32 = 0xFFFFFFFF
_ELEMENTS_AT_ONCE = 2**18  # bounds the scratch memory, and keeps it in a CPU's second-level cache: 2 MB a tensor


def bits(index: Tensor, key: int) -> Tensor:
    """32 random bits for each element index: int64 of index's shape, in 0 <= bits < 2**32.

    index: int64 >= 0. key: 64 bits.
    """
    return _draw(index, key, torch.int64, lambda block: block)


def uniform(index: Tensor, key: int) -> Tensor:
    """Uniform float32 in 0 <= u < 1 for each element index: the upper 24 of its bits."""
    return _draw(index, key, torch.float32, lambda block: (block >> 8).to(torch.float32) * 2.0**-24)


def normal(index: Tensor, key: int) -> Tensor:
    """Standard normal float32 for each element index, by Box and Muller's transform.

    Elements 2j and 2j + 1 are the cosine and the sine of one pair. Computed in float64, so that devices, whose
    functions differ in the last place, round to the same float32 but in rare cases.
    """
    return _draw(index, key, torch.float32, _box_muller)


def _box_muller(block: Tensor) -> Tensor:
    wide = block.to(torch.float64)
    radius = ((wide[:, 0::2] + 1) * 2.0**-32).log_().mul_(-2).sqrt_()  # of a uniform in 0 < u <= 1; [blocks, 2]
    angle = wide[:, 1::2] * (2 * math.pi * 2.0**-32)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).to(torch.float32).flatten(1)  # [blocks, 4]


def _draw(index: Tensor, key: int, dtype: torch.dtype, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """`transform`, from blocks of bits [blocks, 4] to numbers [blocks, 4], read at each element index."""
    if index.dtype != torch.int64:
        raise ValueError(f"element indices are int64, got {index.dtype}; call .to(torch.int64)")
    if not 0 <= key < 2**64:
        raise ValueError(f"a key has 64 bits, got {key}; make it with weft.mesh.derive_key")
    output = torch.empty(index.shape, dtype=dtype, device=index.device)
    flat, at = output.view(-1), index.reshape(-1)
    for start in range(0, at.numel(), _ELEMENTS_AT_ONCE):
        piece = at[start : start + _ELEMENTS_AT_ONCE]
        # Neighbours share a block: it is computed once for a run of elements.
        counter, place = torch.unique_consecutive(piece >> 2, return_inverse=True)
        numbers = transform(_blocks(counter, torch.zeros_like(counter), key))
        flat[start : start + _ELEMENTS_AT_ONCE] = numbers.view(-1)[place.mul_(4).add_(piece & 3)]
    return output


def _blocks(low: Tensor, high: Tensor, key: int) -> Tensor:
    """The counters' lower and upper 64 bits, [blocks] int64 each -> [blocks, 4] of 32 bits each."""
    c0, c1, c2, c3 = (part & _LOW32 for part in (low, low >> 32, high, high >> 32))
    k0, k1 = key & _LOW32, key >> 32
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1.bitwise_xor_(c1).bitwise_xor_(k0), low1, high0.bitwise_xor_(c3).bitwise_xor_(k1), low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW32, (k1 + _KEY_STEPS[1]) & _LOW32
    return torch.stack((c0, c1, c2, c3), -1)


def _multiply(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of x * constant, both of 32 bits; by halves of the constant, as int64 holds 63 bits."""
    lower = x * (constant & 0xFFFF)  # 48 bits
    upper = (x * (constant >> 16)).add_(lower >> 16)  # 49 bits
    low = (upper & 0xFFFF).bitwise_left_shift_(16).bitwise_or_(lower.bitwise_and_(0xFFFF))
    return upper.bitwise_right_shift_(16), low
