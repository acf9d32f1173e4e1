"""Rotary position embedding of local tensors (Su et al. 2021, eq. 34), alone or after an RMS norm of each head.

`forward`, `inference`, `backward`, `norm_forward` and `norm_backward` choose the code by `use_triton`. Triton kernels
compute on a GPU and in Triton's interpreter. Plain torch (the `plain_` functions, and those of `rms_norm`) computes
on a CPU and in float64, and defines the result. `plain_table` computes the tables of angles, on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import is_compiling, use_triton
from ..dispatch.op import Tensors
from ..launching.launched import launched
from ..rms_norm import function as norm


def forward(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inplace: bool = False
) -> tuple[Tensor, Tensors]:
    """Rope of x, as in `plain_forward`; saves cos and sin. inplace: a kernel overwrites a contiguous x."""
    overwrites = inplace and use_triton(x) and x.is_contiguous() and not is_compiling()
    return _rotate(x, cos, sin, False, interleaved, x if overwrites else None), (cos, sin)


def inference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inplace: bool = False) -> Tensor:
    """The output of `forward`, without saved tensors."""
    if use_triton(x):
        return forward(x, cos, sin, interleaved=interleaved, inplace=inplace)[0]
    return _plain_rotation(x, cos, sin, interleaved, 1)  # the shortest path: for a single token the host's time counts


def backward(
    saved: Tensors, grad: Tensor, needed: Sequence[bool], *, interleaved: bool = False, inplace: bool = False
) -> Tensors:
    """The gradient of x: grad rotated by the negative angles, at the same scale. cos and sin get no gradient.

    Never in place, whatever `inplace` says: other readers may share grad.
    """
    cos, sin = saved
    assert cos is not None and sin is not None, "forward saves both"
    return _rotate(grad, cos, sin, True, interleaved) if needed[0] else None, None, None


def norm_forward(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float, interleaved: bool = False
) -> tuple[Tensor, Tensors]:
    """x [..., T, heads * D], weight [D] -> rope of the RMS norm of each head.

    Saves the operands and rrms [..., T, heads, 1], the reciprocal root mean square of each head in float32.
    """
    D = weight.shape[0]
    if not use_triton(x):
        y, (_, _, rrms) = norm.plain_forward(x, weight, eps=eps, head_dim=D)
        return plain_forward(y, cos, sin, interleaved=interleaved), (x, weight, cos, sin, rrms)
    _check_fit(x, cos)
    y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    rrms = torch.empty((*x.shape[:-1], x.shape[-1] // D, 1), dtype=torch.float32, device=x.device)
    _launch_norm_forward(x, weight, cos, sin, y, rrms, eps, interleaved)
    return y, (x, weight, cos, sin, rrms)


def norm_backward(
    saved: Tensors, grad: Tensor, needed: Sequence[bool], *, eps: float, interleaved: bool = False
) -> Tensors:
    """The gradients of x and weight: rope's backward, then the norm's. cos and sin get no gradient."""
    x, weight, cos, sin, rrms = saved
    assert x is not None and weight is not None and cos is not None and sin is not None, (
        "norm_forward saves the operands"
    )
    if not use_triton(x):
        norm_grad = plain_backward(grad, cos, sin, interleaved=interleaved)
        dx, dweight = norm.plain_backward((x, weight, rrms), norm_grad, needed[:2], eps=eps, head_dim=weight.shape[0])
        return dx, dweight, None, None
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed[0] else None
    dweight = torch.empty_like(weight) if needed[1] else None
    _launch_norm_backward(grad, x, weight, cos, sin, rrms, dx, dweight, interleaved)
    return dx, dweight, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool, interleaved: bool, out: Tensor | None = None) -> Tensor:
    """Return rope of x, or with `inverse` its transpose. out: for the result of a kernel; None for a new tensor."""
    if not use_triton(x):
        rotate = plain_backward if inverse else plain_forward
        return rotate(x, cos, sin, interleaved=interleaved)
    _check_fit(x, cos)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch_rotation(x, cos, sin, y, inverse, interleaved)
    return y


@launched("rope(Tensor x, Tensor cos, Tensor sin, Tensor(a!) y, bool inverse, bool interleaved)")
def _launch_rotation(*arguments: Any) -> None:
    from . import launch  # imports triton, which a CPU run may not have

    launch.turn(*arguments)


@launched(
    "rms_norm_rope(Tensor x, Tensor weight, Tensor cos, Tensor sin, Tensor(a!) y, Tensor(b!) rrms, float eps, bool "
    "interleaved)"
)
def _launch_norm_forward(*arguments: Any) -> None:
    from . import launch

    launch.normalize_and_turn(*arguments)


@launched(
    "rms_norm_rope_backward(Tensor grad, Tensor x, Tensor weight, Tensor cos, Tensor sin, Tensor rrms, "
    "Tensor(a!)? dx, Tensor(b!)? dweight, bool interleaved)"
)
def _launch_norm_backward(*arguments: Any) -> None:
    from . import launch

    launch.normalize_and_turn_backward(*arguments)


def plain_forward(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x [..., T, heads * D], cos and sin [T, D // 2] or [..., T, D // 2] -> [..., T, heads * D].

    Elements i and i + D // 2 of a head form a pair, rotated by the angle of (token, i): Hugging Face's convention.
    interleaved: elements 2 * i and 2 * i + 1 form a pair, as in the paper.
    Computed in float32 at least, then rounded to x's dtype.
    Raises ValueError where D does not divide the last dim, or the tables have another T, or other leading dims, than x.
    """
    _check_fit(x, cos)
    return _plain_rotation(x, cos, sin, interleaved, 1)


def _check_fit(x: Tensor, cos: Tensor) -> None:
    """Raises ValueError where the tables do not fit x; see `plain_forward`."""
    rows, half = cos.shape[:-1], cos.shape[-1]
    if x.shape[-1] % (2 * half) or x.shape[-1 - len(rows) : -1] != rows:
        raise ValueError(
            f"rope: x of shape {tuple(x.shape)} does not fit tables of shape {tuple(cos.shape)}; "
            f"x is [..., {', '.join(map(str, rows))}, heads * {2 * half}]"
        )


def plain_backward(grad: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """The transpose of `plain_forward`: rotation by the negative angles, at the same scale. The inverse at scale 1."""
    return _plain_rotation(grad, cos, sin, interleaved, -1)


def _plain_rotation(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    """`plain_forward` for sign 1, `plain_backward` for sign -1, without a check of the shapes."""
    dtype, shape, half = x.dtype, x.shape, cos.shape[-1]
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.promote_types(dtype, torch.float32)
    # Checked before each cast: on small tensors, a cast to the same dtype costs as much as a real one.
    if cos.dtype != wide:
        cos, sin = cos.to(wide), sin.to(wide)
    if interleaved:
        rotate_pairs = _rotate_neighbours if is_compiling() else _rotate_complex
        output = rotate_pairs(x if dtype == wide else x.to(wide), cos, sin, sign)
        return output if dtype == wide else output.to(dtype)
    pairs = x.reshape(*shape[:-1], shape[-1] // (2 * half), 2, half)  # [..., T, heads, 2, D // 2]
    if dtype != wide:
        pairs = pairs.to(wide)
    first, second = pairs.unbind(-2)
    sin = sin.unsqueeze(-2)  # [..., T, 1, D // 2]
    rotated = pairs * cos.unsqueeze(-2).unsqueeze(-2)
    rotated_first, rotated_second = rotated.unbind(-2)
    rotated_first.addcmul_(second, sin, value=-sign)
    rotated_second.addcmul_(first, sin, value=sign)
    output = rotated.view(shape)
    return output if dtype == wide else output.to(dtype)


def _rotate_complex(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Interleaved rope in one pass: each pair is a complex number, multiplied by cos + i sin."""
    # view_as_complex takes an even offset only.
    x = x.contiguous() if x.storage_offset() % 2 == 0 else x.clone(memory_format=torch.contiguous_format)
    numbers = torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // (2 * cos.shape[-1]), cos.shape[-1], 2))
    turns = torch.complex(cos, sin if sign == 1 else -sin).unsqueeze(-2)  # [..., T, 1, D // 2]
    return torch.view_as_real(numbers * turns).view(x.shape)


def _rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Interleaved rope for torch.compile, which generates no code for complex numbers.

    Reorders each head so that the first elements of all pairs come first, rotates as without `interleaved`, and
    restores the order.
    """
    pair_shape = (*x.shape[:-1], x.shape[-1] // (2 * cos.shape[-1]), cos.shape[-1], 2)  # [..., heads, D // 2, 2]
    halves = x.reshape(pair_shape).transpose(-1, -2).reshape(x.shape)
    rotated = _plain_rotation(halves, cos, sin, False, sign).view(*pair_shape[:-2], 2, cos.shape[-1])
    return rotated.transpose(-1, -2).reshape(x.shape)


def plain_table(positions: Tensor, frequencies: Tensor, *, function: str, scale: float = 1.0) -> Tensor:
    """positions [...] of ints, frequencies [D // 2] -> [..., D // 2]: scale * function(position * frequency)."""
    angles = positions.unsqueeze(-1) * frequencies
    table = angles.cos() if function == "cos" else angles.sin()
    return table if scale == 1 else table.mul_(scale)
