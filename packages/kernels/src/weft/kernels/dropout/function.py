"""dropout of local tensors, forward and backward: one function, for it is linear and its own transpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library
from weft.mesh.random import derive_key

from ..backend import use_triton
from ..op import Tensors
from ..order import Runs
from ..random.part import Part
from . import reference


def forward(
    x: Tensor,
    key: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    p: float,
    number: int = 0,
    name: str | None = None,
    part: Part | None = None,
    order: Runs | None = None,
    parts: tuple[Part, ...] | None = None,
) -> tuple[Tensor, Tensors]:
    """The output; but for the key nothing is saved, since backward draws the mask again.

    residual: what the output is added to, of the shape of x; or nothing. The key is `key` or, without it, `number`; with a name it is derive_key of the two.
    part: which elements of the global tensor x is; all of them without.
    order: of the tokens, dim -2, where they lie in another than they are read in; parts: then, for each of x's runs of them,
    which elements it is as they are read.
    """
    return _masked_in_order(x, residual, key, p, number, name, part, order, parts), () if key is None else (key,)


def backward(
    saved: Tensors,
    grad: Tensor,
    needed: Sequence[bool],
    *,
    p: float,
    number: int = 0,
    name: str | None = None,
    part: Part | None = None,
    order: Runs | None = None,
    parts: tuple[Part, ...] | None = None,
) -> Tensors:
    """The gradient, dropped and scaled as x was; that of the residual is the incoming one; the key has none."""
    key = saved[0] if saved else None
    masked = _masked_in_order(grad, None, key, p, number, name, part, order, parts) if needed[0] else None
    return (masked, None, grad if needed[2:] and needed[2] else None)[: len(needed)]


def _masked_in_order(
    x: Tensor,
    residual: Tensor | None,
    key: Tensor | None,
    p: float,
    number: int,
    name: str | None,
    part: Part | None,
    order: Runs | None,
    parts: tuple[Part, ...] | None,
) -> Tensor:
    if order is None:
        return _masked(x, residual, key, p, number, name, part)
    parts = parts_of(x.shape, tuple(slice(0, size) for size in x.shape), order) if parts is None else parts
    if not parts:
        return x.new_zeros(x.shape)  # no tokens are here
    lengths = [each.sizes[-2] for each in parts]
    others: Sequence[Tensor | None] = [None] * len(parts) if residual is None else torch.split(residual, lengths, -2)
    pieces = zip(torch.split(x, lengths, -2), others, parts, strict=True)
    return torch.cat([_masked(y, other, key, p, number, name, of) for y, other, of in pieces], -2)


def parts_of(shape: Sequence[int], held: Sequence[slice], runs: Runs) -> tuple[Part, ...]:
    """Which elements of a tensor [..., T, H] the `runs` of tokens are that lie in the box `held`."""
    *lead, _, width = held
    return tuple([Part.of(shape, (*lead, slice(*run), width)) for run in runs])


def _masked(
    x: Tensor, residual: Tensor | None, key: Tensor | None, p: float, number: int, name: str | None, part: Part | None
) -> Tensor:
    part = Part.of(x.shape) if part is None else part
    if key is None:
        return _drawn(x, residual, p, number, name, part)
    masked: Tensor = _of_a_tensor(x, residual, p, key, name, part.offset, part.sizes, part.strides)
    return masked


@library.custom_op("weft::dropout", mutates_args=())
def _of_a_tensor(
    x: Tensor,
    residual: Tensor | None,
    p: float,
    key: Tensor,
    name: str | None,
    offset: int,
    sizes: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    """A node of a graph that is traced once, and draws by another key in each step."""
    part = Part(offset, tuple(sizes), tuple(strides))
    return _drawn(x, residual, p, int(key.view(torch.int64)) % 2**64, name, part)


@_of_a_tensor.register_fake
def _(x: Tensor, *more: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _drawn(x: Tensor, residual: Tensor | None, p: float, key: int, name: str | None, part: Part) -> Tensor:
    key = key if name is None else derive_key(key, name)
    threshold = round(p * 2**32)  # exact: p * 2**32 only moves the exponent
    if threshold == 2**32:
        return x.new_zeros(x.shape) if residual is None else residual.clone(memory_format=torch.contiguous_format)
    scale = 1 / (1 - p)
    if use_triton(x):
        from . import launch  # imports triton, which a CPU run may not have

        return launch.masked(x, residual, part, key, threshold=threshold, scale=scale)
    return reference.masked(x, residual, part, key, threshold=threshold, scale=scale)
