"""Dropout of local tensors. Forward and backward are the same function: dropout is linear, and its own transpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library
from weft.mesh import derive_key

from ..dispatch import backend
from ..dispatch.op import Tensors
from ..dispatch.token_order import Runs
from ..random.part import Part
from . import reference

DROPS_ALL = 2**16  # a threshold above every number of 16 bits


def quantized(p: float) -> tuple[int, float]:
    """(threshold, scale) for the drop probability p, rounded to a multiple of 2**-16.

    An element is dropped where its 16 random bits are below the threshold. Kept elements are multiplied by the scale,
    the inverse of their share; the scale is 0 where all elements are dropped.
    """
    threshold = round(p * DROPS_ALL)
    return threshold, 0.0 if threshold == DROPS_ALL else DROPS_ALL / (DROPS_ALL - threshold)


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
    held: list[Tensor] | None = None,
) -> tuple[Tensor, Tensors]:
    """Dropout of x, plus the residual. Only the key is saved: backward draws the mask again, or takes it from `held`.

    key, number, name: the random key is `key`, or `number` where that is None; with a name it is derive_key(key, name).
    residual: added to the output; of the shape of x, or None.
    part: which box of the global tensor x is; None means all of it.
    order: the stored order of the tokens (dim -2), where it is not the sequence's.
    parts: with an order, for each of x's runs of tokens, which box of the global tensor it is, in the sequence's order.
    held: an empty list in which forward leaves the mask for backward, one byte an element. Used for float32 and
        float64 on a CPU, where drawing the mask takes longer than everything else. The mask is not a saved tensor of
        the graph: under activation recomputation, reading one would recompute the layer up to here, with its
        communication, for a mask that exists already.
    """
    parts = _parts(x, part, order, parts)
    threshold, scale = quantized(p)
    redraws = key is not None or backend.use_triton(x) or backend.is_short_of_memory(x)
    if held is None or redraws or threshold == DROPS_ALL or not parts:
        return _masked(x, residual, key, p, number, name, parts), () if key is None else (key,)
    number = number if name is None else derive_key(number, name)
    drawn = [reference.drawn(each, number, threshold, x.device) for each in parts]
    held.append(drawn[0] if len(drawn) == 1 else torch.cat(drawn, -2))
    return reference.masked(x, held[0], residual, scale=scale), ()


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
    held: list[Tensor] | None = None,
) -> Tensors:
    """Gradients of x, key and residual: dropout of the upstream gradient, None, and the upstream gradient."""
    of_x: Tensor | None = None
    if needed[0] and held:
        of_x = reference.masked(grad, held.pop(), None, scale=quantized(p)[1])
    elif needed[0]:
        of_x = _masked(grad, None, saved[0] if saved else None, p, number, name, _parts(grad, part, order, parts))
    return (of_x, None, grad if needed[2:] and needed[2] else None)[: len(needed)]


def _parts(x: Tensor, part: Part | None, order: Runs | None, parts: tuple[Part, ...] | None) -> tuple[Part, ...]:
    """For each of x's runs of tokens, which box of the global tensor it is. Without an order, x is a single run."""
    if order is None:
        return (Part.of(x.shape) if part is None else part,)
    return parts_of(x.shape, tuple(slice(0, size) for size in x.shape), order) if parts is None else parts


def parts_of(shape: Sequence[int], box: Sequence[slice], runs: Runs) -> tuple[Part, ...]:
    """For each run of tokens, which box of a global tensor of `shape`, [..., T, H], it is.

    box: this rank's slices of the stored tensor; its token slice is replaced by the runs.
    """
    *lead, _, width = box
    return tuple([Part.of(shape, (*lead, slice(*run), width)) for run in runs])


def _masked(
    x: Tensor,
    residual: Tensor | None,
    key: Tensor | None,
    p: float,
    number: int,
    name: str | None,
    parts: tuple[Part, ...],
) -> Tensor:
    if len(parts) == 1:
        return _masked_part(x, residual, key, p, number, name, parts[0])
    if not parts:
        return x.new_zeros(x.shape)  # this rank holds no tokens
    lengths = [each.sizes[-2] for each in parts]
    others: Sequence[Tensor | None] = [None] * len(parts) if residual is None else torch.split(residual, lengths, -2)
    pieces = zip(torch.split(x, lengths, -2), others, parts, strict=True)
    return torch.cat([_masked_part(y, other, key, p, number, name, of) for y, other, of in pieces], -2)


def _masked_part(
    x: Tensor, residual: Tensor | None, key: Tensor | None, p: float, number: int, name: str | None, part: Part
) -> Tensor:
    if key is None:
        return _drawn(x, residual, p, number, name, part)
    masked: Tensor = _masked_by_tensor_key(x, residual, p, key, name, part.offset, part.sizes, part.strides)
    return masked


@library.custom_op("weft::dropout", mutates_args=())
def _masked_by_tensor_key(
    x: Tensor,
    residual: Tensor | None,
    p: float,
    key: Tensor,
    name: str | None,
    offset: int,
    sizes: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    """Dropout with the key in a tensor: one node of a compiled graph, which takes a new key in each step."""
    part = Part(offset, tuple(sizes), tuple(strides))
    return _drawn(x, residual, p, int(key.view(torch.int64)) % 2**64, name, part)


@_masked_by_tensor_key.register_fake
def _(x: Tensor, *more: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _drawn(x: Tensor, residual: Tensor | None, p: float, key: int, name: str | None, part: Part) -> Tensor:
    key = key if name is None else derive_key(key, name)
    threshold, scale = quantized(p)
    if threshold == DROPS_ALL:
        return x.new_zeros(x.shape) if residual is None else residual.clone(memory_format=torch.contiguous_format)
    if backend.use_triton(x):
        from . import launch  # imports triton, which a CPU run may not have

        return launch.masked(x, residual, part, key, threshold=threshold, scale=scale)
    return reference.masked(x, reference.drawn(part, key, threshold, x.device), residual, scale=scale)
