"""dropout of local tensors, forward and backward: one function, for it is linear and its own transpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library
from weft.mesh.random import derive_key

from .. import backend
from ..op import Tensors
from ..order import Runs
from ..random.part import Part
from . import reference

DROPS_ALL = 2**16  # the threshold that is above all that 16 bits say


def quantized(p: float) -> tuple[int, float]:
    """Below which 16 bits an element is dropped, and what the others are multiplied by: the inverse of their share, or 0 without any."""
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
    """The output; but for the key nothing is saved, since backward draws the mask again, where that is not `held`.

    residual: what the output is added to, of the shape of x; or nothing. The key is `key` or, without it, `number`; with a name it is derive_key of the two.
    part: which elements of the global tensor x is; all of them without.
    order: of the tokens, dim -2, where they lie in another than they are read in; parts: then, for each of x's runs of them,
    which elements it is as they are read.
    held: of float32 and float64 on a CPU, where to draw a mask takes longer than all else, it is given which elements are kept, a byte
    for each, and backward takes that from it. They are not saved as tensors of the graph are: a layer that is computed again would
    go on as far as here, and communicate, for what it has already.
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
    """The gradient, dropped and scaled as x was; that of the residual is the incoming one; the key has none."""
    of_x: Tensor | None = None
    if needed[0] and held:
        of_x = reference.masked(grad, held.pop(), None, scale=quantized(p)[1])
    elif needed[0]:
        of_x = _masked(grad, None, saved[0] if saved else None, p, number, name, _parts(grad, part, order, parts))
    return (of_x, None, grad if needed[2:] and needed[2] else None)[: len(needed)]


def _parts(x: Tensor, part: Part | None, order: Runs | None, parts: tuple[Part, ...] | None) -> tuple[Part, ...]:
    """Which elements of the global tensor each of x's runs of tokens is; one run where they lie as they are read."""
    if order is None:
        return (Part.of(x.shape) if part is None else part,)
    return parts_of(x.shape, tuple(slice(0, size) for size in x.shape), order) if parts is None else parts


def parts_of(shape: Sequence[int], held: Sequence[slice], runs: Runs) -> tuple[Part, ...]:
    """Which elements of a tensor [..., T, H] the `runs` of tokens are that lie in the box `held`."""
    *lead, _, width = held
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
        return x.new_zeros(x.shape)  # no tokens are here
    lengths = [each.sizes[-2] for each in parts]
    others: Sequence[Tensor | None] = [None] * len(parts) if residual is None else torch.split(residual, lengths, -2)
    pieces = zip(torch.split(x, lengths, -2), others, parts, strict=True)
    return torch.cat([_masked_part(y, other, key, p, number, name, of) for y, other, of in pieces], -2)


def _masked_part(
    x: Tensor, residual: Tensor | None, key: Tensor | None, p: float, number: int, name: str | None, part: Part
) -> Tensor:
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
    threshold, scale = quantized(p)
    if threshold == DROPS_ALL:
        return x.new_zeros(x.shape) if residual is None else residual.clone(memory_format=torch.contiguous_format)
    if backend.use_triton(x):
        from . import launch  # imports triton, which a CPU run may not have

        return launch.masked(x, residual, part, key, threshold=threshold, scale=scale)
    return reference.masked(x, reference.drawn(part, key, threshold, x.device), residual, scale=scale)
