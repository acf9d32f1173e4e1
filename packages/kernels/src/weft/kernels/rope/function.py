"""Rope of local tensors, alone or after an RMS norm of heads, forward and backward: by the kernels or in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import is_compiling, use_triton
from ..dispatch.op import Tensors
from ..launching.launched import launched
from ..rms_norm import reference as norm
from . import reference


def forward(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inplace: bool = False
) -> tuple[Tensor, Tensors]:
    """Rope of x, as in `reference.forward`; saves cos and sin. inplace: a kernel overwrites a contiguous x."""
    over = inplace and use_triton(x) and x.is_contiguous() and not is_compiling()
    return _turned(x, cos, sin, False, interleaved, x if over else None), (cos, sin)


def inference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inplace: bool = False) -> Tensor:
    """The output of `forward`, without saved tensors."""
    if use_triton(x):
        return forward(x, cos, sin, interleaved=interleaved, inplace=inplace)[0]
    return reference.turn(x, cos, sin, interleaved, 1)  # the shortest path: for a single token the host's time counts


def backward(
    saved: Tensors, grad: Tensor, needed: Sequence[bool], *, interleaved: bool = False, inplace: bool = False
) -> Tensors:
    """The gradient of x: grad rotated by the negative angles, at the same scale. cos and sin get no gradient.

    Never in place, whatever `inplace` says: other readers may share grad.
    """
    cos, sin = saved
    assert cos is not None and sin is not None, "forward saves both"
    return _turned(grad, cos, sin, True, interleaved) if needed[0] else None, None, None


def norm_forward(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float, interleaved: bool = False
) -> tuple[Tensor, Tensors]:
    """x [..., T, heads * D], weight [D] -> rope of the RMS norm of each head. Saves the operands and rrms."""
    D = weight.shape[0]
    if not use_triton(x):
        y, (_, _, rrms) = norm.forward(x, weight, eps=eps, head_dim=D)
        return reference.forward(y, cos, sin, interleaved=interleaved), (x, weight, cos, sin, rrms)
    reference.check(x, cos)
    y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    rrms = torch.empty((*x.shape[:-1], x.shape[-1] // D, 1), dtype=torch.float32, device=x.device)
    _norm_forward(x, weight, cos, sin, y, rrms, eps, interleaved)
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
        back = reference.turned_back(grad, cos, sin, interleaved=interleaved)
        dx, dweight = norm.backward((x, weight, rrms), back, needed[:2], eps=eps, head_dim=weight.shape[0])
        return dx, dweight, None, None
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed[0] else None
    dweight = torch.empty_like(weight) if needed[1] else None
    _norm_backward(grad, x, weight, cos, sin, rrms, dx, dweight, interleaved)
    return dx, dweight, None, None


def _turned(
    x: Tensor, cos: Tensor, sin: Tensor, inverse: bool, interleaved: bool, into: Tensor | None = None
) -> Tensor:
    if not use_triton(x):
        turned = reference.turned_back if inverse else reference.forward
        return turned(x, cos, sin, interleaved=interleaved)
    reference.check(x, cos)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if into is None else into
    _turn(x, cos, sin, y, inverse, interleaved)
    return y


@launched("rope(Tensor x, Tensor cos, Tensor sin, Tensor(a!) y, bool inverse, bool interleaved)")
def _turn(*arguments: Any) -> None:
    from . import launch  # imports triton, which a CPU run may not have

    launch.turn(*arguments)


@launched(
    "rms_norm_rope(Tensor x, Tensor weight, Tensor cos, Tensor sin, Tensor(a!) y, Tensor(b!) rrms, float eps, bool "
    "interleaved)"
)
def _norm_forward(*arguments: Any) -> None:
    from . import launch

    launch.normalize_and_turn(*arguments)


@launched(
    "rms_norm_rope_backward(Tensor grad, Tensor x, Tensor weight, Tensor cos, Tensor sin, Tensor rrms, "
    "Tensor(a!)? dx, Tensor(b!)? dweight, bool interleaved)"
)
def _norm_backward(*arguments: Any) -> None:
    from . import launch

    launch.normalize_and_turn_backward(*arguments)
