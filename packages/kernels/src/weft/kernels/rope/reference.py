"""rope: rotary position embedding (Su et al. 2021, eq. 34), in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..op import Tensors


def forward(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensors]:
    """x [..., T, heads * D], cos and sin [T, D // 2] or [..., T, D // 2] -> [..., T, heads * D].

    Elements i and i + D // 2 of a head are turned together, by the angle of (token, i): Hugging Face's convention.
    Computed in float32 at least, then rounded to x's dtype.
    Raises ValueError where the last dim is no multiple of D, or the tables are of other tokens than x.
    """
    *rows, half = cos.shape
    if x.shape[-1] % (2 * half) or list(x.shape[-1 - len(rows) : -1]) != rows:
        raise ValueError(
            f"rope: x of shape {tuple(x.shape)} does not fit tables of shape {tuple(cos.shape)}; "
            f"x is [..., {', '.join(map(str, rows))}, heads * {2 * half}]"
        )
    return _turn(x, cos, sin), (cos, sin)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool]) -> Tensors:
    """The turn back, by the negative angle and the same scale; cos and sin get no gradient."""
    cos, sin = saved
    assert cos is not None and sin is not None, "forward saves both"
    return _turn(grad, cos, -sin) if needed[0] else None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    half = cos.shape[-1]
    pairs = wide.reshape(*x.shape[:-1], x.shape[-1] // (2 * half), 2, half)  # [..., T, heads, 2, D // 2]
    first, second = pairs.unbind(-2)
    cos, sin = (
        cos.to(wide.dtype)[..., None, None, :],
        sin.to(wide.dtype).unsqueeze(-2),
    )  # [..., T, 1, 1, D // 2], [..., T, 1, D // 2]
    turned = pairs * cos
    turned_first, turned_second = turned.unbind(-2)
    turned_first.addcmul_(second, sin, value=-1)
    turned_second.addcmul_(first, sin)
    return turned.view(x.shape).to(x.dtype)


def table(positions: Tensor, frequencies: Tensor, *, function: str, scale: float = 1.0) -> Tensor:
    """scale times the cosine or sine of each angle: positions [...] of ints, frequencies [D // 2] -> [..., D // 2]."""
    angles = positions.unsqueeze(-1) * frequencies
    found = angles.cos() if function == "cos" else angles.sin()
    return found if scale == 1 else found.mul_(scale)
