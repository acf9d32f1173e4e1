"""Dropout of local tensors. Forward and backward are the same function: dropout is linear, and its own transpose.

`forward` and `backward` run on every device. On a GPU and in Triton's interpreter, a Triton kernel (`launch.masked`)
draws and applies the mask in one pass. Plain torch (`plain_mask`, then `_plain_masked`) computes on a CPU and in
float64, and defines the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library
from weft.mesh import derive_key

from ..dispatch import backend
from ..dispatch.op import Tensors
from ..dispatch.token_order import Runs, runs_within
from ..random import philox
from ..random.philox import Part

DROPS_ALL = 2**16  # a threshold above every number of 16 bits


def number_of(key: Tensor) -> int:
    """The number in a random key given as a tensor, to dropout or attention: one uint64 on the CPU.

    Reading the number waits for no device.
    """
    return int(key.view(torch.int64)) % 2**64


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
    orders: tuple[Runs, ...] | None = None,
    by_row: bool = False,
    box: tuple[tuple[int, ...], tuple[slice, ...]] | None = None,
    saved_mask: list[Tensor] | None = None,
) -> tuple[Tensor, Tensors]:
    """Dropout of x, plus the residual; called by the op `DROPOUT` (sharded.py) with this rank's part of each operand.

    Returns the output, and the tensors saved for backward: the key, if given as a tensor. Backward draws the mask
    again, or takes the mask from `saved_mask`.

    key, number: the random key, as a tensor; or as an int, where `key` is None. With a name, derive_key(key, name)
        takes the key's place.
    residual: added to the output; of the shape of x, or None.
    part: the box of the global tensor held in x; None: x is the global tensor.
    order: with tokens (dim -2) stored in this order, not in the sequence's; takes the place of `part`.
    parts: with `order`, a box for each of x's runs of tokens. The boxes count tokens in the sequence's order. None: x
        is the global tensor.
    orders: for x [B, T, H], an order for each row, where the rows differ; takes the place of `order`.
    box: with `orders`, the shape of the global tensor and this rank's slices; None: x is the global tensor.
    by_row: whether `orders` is given. Read by the layout rule of the op, which does not receive `orders` (`varying`).
    saved_mask: an empty list, the same in forward and backward: forward puts the mask there, one byte an element. Used
        for float32 and float64 on a CPU, where drawing the mask takes longer than everything else. As a saved tensor of
        the graph the mask would be recomputed under activation recomputation, with all of the layer up to here and its
        communication.
    """
    if orders is not None:
        parts, rows = _parts_of_rows(x.shape, box, orders), (1, -1, x.shape[-1])
        residual = None if residual is None else residual.reshape(rows)
        options: Any = {"p": p, "number": number, "name": name, "parts": parts, "order": (), "saved_mask": saved_mask}
        output, saved = forward(x.reshape(rows), key, residual, **options)
        return output.view(x.shape), saved
    parts = _parts(x, part, order, parts)
    threshold, scale = quantized(p)
    redraws = key is not None or backend.use_triton(x) or backend.is_short_of_memory(x)
    if saved_mask is None or redraws or threshold == DROPS_ALL or not parts:
        return _dropout_of_parts(x, residual, key, p, number, name, parts), () if key is None else (key,)
    number = number if name is None else derive_key(number, name)
    masks = [plain_mask(each, number, threshold, x.device) for each in parts]
    saved_mask.append(masks[0] if len(masks) == 1 else torch.cat(masks, -2))
    return _plain_masked(x, saved_mask[0], residual, scale=scale), ()


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
    orders: tuple[Runs, ...] | None = None,
    by_row: bool = False,
    box: tuple[tuple[int, ...], tuple[slice, ...]] | None = None,
    saved_mask: list[Tensor] | None = None,
) -> Tensors:
    """Gradients of x, key and residual: dropout of the upstream gradient, None, and the upstream gradient."""
    of_x: Tensor | None = None
    if orders is not None:
        rows: Any = grad.reshape(1, -1, grad.shape[-1]), (needed[0],)
        parts = _parts_of_rows(grad.shape, box, orders)
        (of_x,) = backward(saved, *rows, p=p, number=number, name=name, order=(), parts=parts, saved_mask=saved_mask)
        of_x = None if of_x is None else of_x.view(grad.shape)
    elif needed[0] and saved_mask:
        of_x = _plain_masked(grad, saved_mask.pop(), None, scale=quantized(p)[1])
    elif needed[0]:
        of_x = _dropout_of_parts(
            grad, None, saved[0] if saved else None, p, number, name, _parts(grad, part, order, parts)
        )
    return (of_x, None, grad if needed[2:] and needed[2] else None)[: len(needed)]


def _parts(x: Tensor, part: Part | None, order: Runs | None, parts: tuple[Part, ...] | None) -> tuple[Part, ...]:
    """The box of the global tensor for each of x's runs of tokens. Without an order, x is a single run."""
    if order is None:
        return (Part.of(x.shape) if part is None else part,)
    return parts_of(x.shape, tuple(slice(0, size) for size in x.shape), order) if parts is None else parts


def parts_of(shape: Sequence[int], box: Sequence[slice], runs: Runs) -> tuple[Part, ...]:
    """For each run of tokens, the box in a global tensor of `shape`, [..., T, H], with tokens in the sequence's order.

    box: this rank's slices of the tensor as stored. Its slice of dim -2 counts stored tokens, so a run replaces it.
    runs: this rank's tokens, [start, stop) in the sequence's order.
    """
    *lead, _, width = box
    return tuple([Part.of(shape, (*lead, slice(*run), width)) for run in runs])


def _parts_of_rows(
    shape: Sequence[int], box: tuple[tuple[int, ...], tuple[slice, ...]] | None, orders: tuple[Runs, ...]
) -> tuple[Part, ...]:
    """`parts_of` for each row of x in turn, with the row's own order. shape: of x, [B, T, H]. box: as in `forward`.

    Raises ValueError for another number of orders than of rows.
    """
    whole, (rows, tokens, width) = (shape, [slice(0, size) for size in shape]) if box is None else box
    if len(orders) != rows.stop - rows.start:
        raise ValueError(
            f"dropout: orders has {len(orders)} orders for {rows.stop - rows.start} rows; give one for each row"
        )
    return tuple(
        [
            part
            for row, order in zip(range(rows.start, rows.stop), orders, strict=True)
            for part in parts_of(
                whole, (slice(row, row + 1), tokens, width), runs_within(order, tokens.start, tokens.stop)
            )
        ]
    )


def _dropout_of_parts(
    x: Tensor,
    residual: Tensor | None,
    key: Tensor | None,
    p: float,
    number: int,
    name: str | None,
    parts: tuple[Part, ...],
) -> Tensor:
    if len(parts) == 1:
        return _dropout_of_part(x, residual, key, p, number, name, parts[0])
    if not parts:
        return x.new_zeros(x.shape)  # this rank holds no tokens
    lengths = [each.sizes[-2] for each in parts]
    residuals: Sequence[Tensor | None] = [None] * len(parts) if residual is None else torch.split(residual, lengths, -2)
    pieces = zip(torch.split(x, lengths, -2), residuals, parts, strict=True)
    return torch.cat([_dropout_of_part(y, added, key, p, number, name, of) for y, added, of in pieces], -2)


def _dropout_of_part(
    x: Tensor, residual: Tensor | None, key: Tensor | None, p: float, number: int, name: str | None, part: Part
) -> Tensor:
    if key is None:
        return _dropout_by_number(x, residual, p, number, name, part)
    output: Tensor = _dropout_by_tensor_key(x, residual, p, key, name, part.offset, part.sizes, part.strides)
    return output


@library.custom_op("weft::dropout", mutates_args=())
def _dropout_by_tensor_key(
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
    return _dropout_by_number(x, residual, p, number_of(key), name, part)


@_dropout_by_tensor_key.register_fake
def _(x: Tensor, *more: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _dropout_by_number(x: Tensor, residual: Tensor | None, p: float, key: int, name: str | None, part: Part) -> Tensor:
    key = key if name is None else derive_key(key, name)
    threshold, scale = quantized(p)
    if threshold == DROPS_ALL:
        return x.new_zeros(x.shape) if residual is None else residual.clone(memory_format=torch.contiguous_format)
    if backend.use_triton(x):
        from . import launch  # imports triton, which a CPU run may not have

        return launch.masked(x, residual, part, key, threshold=threshold, scale=scale)
    return _plain_masked(x, plain_mask(part, key, threshold, x.device), residual, scale=scale)


def plain_mask(part: Part, key: int, threshold: int, device: torch.device) -> Tensor:
    """The dropout mask of the elements in `part`, an int8 tensor: -1 (all bits set) where kept, 0 where dropped.

    An element is kept where its 16 random bits are `threshold` or more.
    """
    mask = torch.empty(part.sizes, dtype=torch.int8, device=device)

    def transform(words: philox.Words) -> Tensor:
        halves = philox.as_halves(words)
        return torch.ge(halves, threshold - 2**15, out=halves).neg_()  # comparing into a bool takes ten times as long

    philox.fill(mask, part, key, transform, philox.HALVES)
    return mask


def _plain_masked(x: Tensor, mask: Tensor, residual: Tensor | None, *, scale: float) -> Tensor:
    """scale * x for kept elements and 0 for dropped ones, even infinite or NaN; plus the residual, unless None.

    x: any strides. mask: from `plain_mask`. Returns a contiguous tensor of x's shape and dtype; the product is
    computed in float32, or in float64 for a float64 x.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    bits = torch.int32 if wide.dtype == torch.float32 else torch.int64
    y = mask.to(bits).bitwise_and_(wide.view(bits)).view(wide.dtype).mul_(scale).to(x.dtype)
    return y if residual is None else y.add_(residual)
