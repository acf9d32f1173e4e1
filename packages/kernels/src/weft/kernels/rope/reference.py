"""Rotary position embedding (Su et al. 2021, eq. 34) in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch.backend import is_compiling


def forward(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x [..., T, heads * D], cos and sin [T, D // 2] or [..., T, D // 2] -> [..., T, heads * D].

    Elements i and i + D // 2 of a head form a pair, rotated by the angle of (token, i): Hugging Face's convention.
    interleaved: elements 2 * i and 2 * i + 1 form a pair, as in the paper.
    Computed in float32 at least, then rounded to x's dtype.
    Raises ValueError where D does not divide the last dim, or the tables have other tokens than x.
    """
    check(x, cos)
    return turn(x, cos, sin, interleaved, 1)


def check(x: Tensor, cos: Tensor) -> None:
    """Raises ValueError where the tables do not fit x; see `forward`."""
    rows, half = cos.shape[:-1], cos.shape[-1]
    if x.shape[-1] % (2 * half) or x.shape[-1 - len(rows) : -1] != rows:
        raise ValueError(
            f"rope: x of shape {tuple(x.shape)} does not fit tables of shape {tuple(cos.shape)}; "
            f"x is [..., {', '.join(map(str, rows))}, heads * {2 * half}]"
        )


def turned_back(grad: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """The transpose of `forward`: rotation by the negative angles, at the same scale. Without a scale, its inverse."""
    return turn(grad, cos, sin, interleaved, -1)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    """`forward` for sign 1, `turned_back` for sign -1, without a check of the shapes."""
    dtype, shape, half = x.dtype, x.shape, cos.shape[-1]
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.promote_types(dtype, torch.float32)
    # Checked before each cast: on small tensors, a cast to the same dtype costs as much as a real one.
    if cos.dtype != wide:
        cos, sin = cos.to(wide), sin.to(wide)
    if interleaved:
        turn_pairs = _turn_neighbours if is_compiling() else _turn_complex
        output = turn_pairs(x if dtype == wide else x.to(wide), cos, sin, sign)
        return output if dtype == wide else output.to(dtype)
    pairs = x.reshape(*shape[:-1], shape[-1] // (2 * half), 2, half)  # [..., T, heads, 2, D // 2]
    if dtype != wide:
        pairs = pairs.to(wide)
    first, second = pairs.unbind(-2)
    sin = sin.unsqueeze(-2)  # [..., T, 1, D // 2]
    turned = pairs * cos.unsqueeze(-2).unsqueeze(-2)
    turned_first, turned_second = turned.unbind(-2)
    turned_first.addcmul_(second, sin, value=-sign)
    turned_second.addcmul_(first, sin, value=sign)
    output = turned.view(shape)
    return output if dtype == wide else output.to(dtype)


def _turn_complex(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Interleaved rope in one pass: each pair is a complex number, multiplied by cos + i sin."""
    x = x.contiguous() if x.storage_offset() % 2 == 0 else x.clone(memory_format=torch.contiguous_format)
    numbers = torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // (2 * cos.shape[-1]), cos.shape[-1], 2))
    turns = torch.complex(cos, sin if sign == 1 else -sin).unsqueeze(-2)  # [..., T, 1, D // 2]
    return torch.view_as_real(numbers * turns).view(x.shape)


def _turn_neighbours(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Interleaved rope for torch.compile, which generates no code for complex numbers."""
    apart = (*x.shape[:-1], x.shape[-1] // (2 * cos.shape[-1]), cos.shape[-1], 2)  # [..., heads, D // 2, 2]
    halves = x.reshape(apart).transpose(-1, -2).reshape(x.shape)
    turned = turn(halves, cos, sin, False, sign).view(*apart[:-2], 2, cos.shape[-1])
    return turned.transpose(-1, -2).reshape(x.shape)


def table(positions: Tensor, frequencies: Tensor, *, function: str, scale: float = 1.0) -> Tensor:
    """positions [...] of ints, frequencies [D // 2] -> [..., D // 2]: scale * function(position * frequency)."""
    angles = positions.unsqueeze(-1) * frequencies
    found = angles.cos() if function == "cos" else angles.sin()
    return found if scale == 1 else found.mul_(scale)
