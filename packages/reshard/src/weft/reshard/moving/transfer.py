"""A tensor's parts as they travel: stacked and padded for a collective, or as boxes exchanged between ranks.

`Stacking`: parts stacked, as in a collective, and side by side, as in the tensor, padded to equal shapes; used by the
executor, by buckets.py (gradients), and by gathering.py (parameters). `Transfer` and `exchange`: a rank's part of an
exchange of boxes, on local tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from weft.mesh.extension import Box, volume

from ..planning.exchange import Messages, contiguous_run, relative_box
from ..planning.steps import AllGather, ReduceScatter, axes_of, dims_of
from ..world.world import Positions
from .collectives import Running, as_work


def pad(local: Tensor, shape: Sequence[int]) -> Tensor:
    """`local`, contiguous, padded with zeros at the end of each dim up to `shape`.

    Called before a collective, by the executor and by buckets.py; `crop` undoes the padding afterwards.
    """
    if list(local.shape) == list(shape):
        return local.contiguous()
    larger = local.new_zeros(shape)
    larger[tuple(slice(size) for size in local.shape)] = local
    return larger


def crop(part: Tensor, shape: Sequence[int]) -> Tensor:
    """A padded part without its padding: the first `shape[i]` elements of each dim i."""
    if tuple(part.shape) != tuple(shape):
        part = part[tuple([slice(size) for size in shape])]
    return part.contiguous()


@dataclass(frozen=True, slots=True)
class Stacking:
    """How equal parts of a tensor are stacked along mesh axes; made by `stacking_of`.

    For an axis of size 2 cutting dim 1 into parts of shape (2, 3): sizes (2,), padded_shape (2, 6), axes_of_dim
    ((), (0,)), split_shape (2, 2, 3) and dim_order (1, 0, 2).
    """

    part: tuple[int, ...]  # shape of each part
    sizes: tuple[int, ...]  # sizes of the mesh axes, outermost in the stack first
    padded_shape: tuple[int, ...]  # shape of the tensor, padded so that all parts have the shape `part`
    axes_of_dim: tuple[tuple[int, ...], ...]  # by dim, the axes that cut the dim, as indices of `sizes`, major first
    split_shape: tuple[int, ...]  # each dim of `padded_shape` split into its axes' sizes and its size in a part
    dim_order: tuple[int, ...]  # permutes the dims of [*sizes, *part] to `split_shape`

    @property
    def parts_are_rows(self) -> bool:
        """Whether only the first dim is cut: each part is then a contiguous run of rows, in the stack's order.

        Read by the executor's all-gather, which can then receive pieces into the result.
        """
        return not any(self.axes_of_dim[1:])

    def as_stacked(self, tensor: Tensor) -> Tensor:
        """A view of a contiguous tensor of shape `padded_shape` as its stacked parts: [*sizes, *part].

        Called before reduce-scatters, and by gathers for a view of the result to fill.
        """
        inverse = [self.dim_order.index(dim) for dim in range(len(self.dim_order))]
        return tensor.reshape(self.split_shape).permute(inverse)

    def unstack(self, stacked: Tensor) -> Tensor:
        """The tensor of shape `padded_shape` made of stacked parts; a copy where the parts' rows are interleaved.

        stacked: of any shape, with the elements of [*sizes, *part] in order.
        """
        return stacked.view(*self.sizes, *self.part).permute(self.dim_order).reshape(self.padded_shape)

    def view_pairs(self, rows: Tensor, tensor: Tensor, positions: Positions) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of views, of `rows` and `tensor`, with the same elements without padding.

        Called by gathering.py, once for each parameter of a bundle; each gather copies the first view to the second.
        rows: [parts, elements of a part], parts with padding. tensor: contiguous, no larger than `padded_shape`.
        positions: the position in the stack of each row's part. A range: the rows are in the stack's order.
        """
        if tuple(tensor.shape) == self.padded_shape and isinstance(positions, range):
            yield rows.view(*self.sizes, *self.part), self.as_stacked(tensor)
            return
        for row, position in zip(rows, positions, strict=True):
            starts = [index * size for index, size in zip(self._indices(position), self.part, strict=True)]
            stops = [min(a + size, end) for a, size, end in zip(starts, self.part, tensor.shape, strict=True)]
            if all(a < b for a, b in zip(starts, stops, strict=True)):
                held = tuple(slice(b - a) for a, b in zip(starts, stops, strict=True))
                yield row.view(self.part)[held], tensor[tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))]

    def _indices(self, position: int) -> list[int]:
        """The index along each dim, in parts, of the part at a position."""
        coordinate = [position // math.prod(self.sizes[axis + 1 :]) % size for axis, size in enumerate(self.sizes)]
        indices = []
        for axes in self.axes_of_dim:
            index = 0
            for axis in axes:
                index = index * self.sizes[axis] + coordinate[axis]
            indices.append(index)
        return indices


@lru_cache(maxsize=65536)
def stacking_of(
    part: tuple[int, ...], leading: tuple[str, ...], sizes: tuple[int, ...], step: AllGather | ReduceScatter
) -> Stacking:
    """How parts of shape `part` are stacked: the input of a ReduceScatter, or the output of an AllGather.

    leading: the mesh axes in stacking order, outermost first. sizes: of these axes.
    step: the collective, whose axes and dims tell which axes cut which dim.
    """
    axes_of_dim = tuple(tuple(leading.index(axis) for axis in _axes_over(step, dim)) for dim in range(len(part)))
    padded_shape = tuple(
        size * math.prod(sizes[axis] for axis in axes) for size, axes in zip(part, axes_of_dim, strict=True)
    )
    dim_order = [dim for inner, axes in enumerate(axes_of_dim) for dim in (*axes, len(sizes) + inner)]
    split_shape = [(*sizes, *part)[dim] for dim in dim_order]
    return Stacking(part, sizes, padded_shape, axes_of_dim, tuple(split_shape), tuple(dim_order))


def _axes_over(step: AllGather | ReduceScatter, dim: int) -> list[str]:
    return [axis for axis, over in zip(axes_of(step), dims_of(step), strict=True) if over == dim]


@dataclass(frozen=True, slots=True)
class Transfer:
    """This rank's part of an exchange. Made by the executor with `Transfer.of`, run by `exchange` in each call.

    A Box is a slice for each dim: below, of this rank's local tensor or of this rank's result.
    """

    sent: list[Box]  # parts of the local tensor to send, in the order of receivers
    send_slice: slice | None  # the elements sent of the flat local tensor; None: no single run, packed first
    sizes_out: list[int]  # elements sent to each member of the group
    received: list[Box]  # parts of the result to receive, in the order of senders
    receive_slice: slice | None  # the elements received of the flat result; None: no single run, unpacked after
    sizes_in: list[int]  # elements received from each member of the group
    local: tuple[Box, Box] | None  # copied by this rank: (part of the result, part of the local tensor); None: nothing

    @classmethod
    def of(cls, held: Box, needed: Box, messages: Messages, ranks: Sequence[int]) -> Transfer:
        """The exchange from this rank's part of the global tensor, the box `held`, to the box `needed`.

        messages: this rank's, with boxes of the global tensor. ranks: the group's members, ascending.
        """
        sent, received = ([box for _, box in boxes] for boxes in (messages.sends, messages.receives))
        sizes = [{rank: volume(box) for rank, box in boxes} for boxes in (messages.sends, messages.receives)]
        sizes_out, sizes_in = ([elements.get(rank, 0) for rank in ranks] for elements in sizes)
        local = messages.local
        return cls(
            [relative_box(box, held) for box in sent],
            contiguous_run(sent, held),
            sizes_out,
            [relative_box(box, needed) for box in received],
            contiguous_run(received, needed),
            sizes_in,
            None if local is None else (relative_box(local, needed), relative_box(local, held)),
        )

    def into_rows(self, senders: Sequence[int], own: int) -> Transfer:
        """The same exchange into [rows, *shape of the result], for a sum in the tree inside `exact_sums`.

        Called when the executor prepares a ReduceExchange. A row for each coordinate along the reduced axes.
        senders: the row of each part in `received`. own: the row for this rank's own part, `local`.
        """
        received = [(slice(row, row + 1), *box) for row, box in zip(senders, self.received, strict=True)]
        local = None if self.local is None else ((slice(own, own + 1), *self.local[0]), self.local[1])
        return replace(self, received=received, receive_slice=None, local=local)


def exchange(
    local: Tensor, result: Tensor, transfer: Transfer, group: dist.ProcessGroup | None, *, add: bool = False
) -> Running:
    """Fills `result` from the local tensors of the group's members; a generator of the collective, see `Running`.

    Called by the executor alone, for all-to-alls, exchanges, permutes, reduce-exchanges and relabels.
    local: not changed. result: contiguous, of any values; with `add` the values are kept and added to.
    Communication: an all-to-all with uneven parts; without a group none, and only `transfer.local` is copied.
    add: adds the parts to `result` instead of overwriting.
    """
    receive_slice = None if add else transfer.receive_slice
    received = result.new_empty(sum(transfer.sizes_in)) if receive_slice is None else result.view(-1)[receive_slice]
    if group is not None:
        send_slice = transfer.send_slice if local.is_contiguous() else None
        sent = local.new_empty(sum(transfer.sizes_out)) if send_slice is None else local.view(-1)[send_slice]
        if send_slice is None:
            parts = [local[box] for box in transfer.sent]
            for packed, part in zip(_split_as(parts, sent), parts, strict=True):
                packed.copy_(part)
        sizes_in, sizes_out = transfer.sizes_in, transfer.sizes_out
        yield as_work(dist.all_to_all_single(received, sent, sizes_in, sizes_out, group, async_op=True))
    copies: list[tuple[Tensor, Tensor]] = []  # (part of the result, its values)
    if receive_slice is None:
        targets = [result[box] for box in transfer.received]
        copies += zip(targets, _split_as(targets, received), strict=True)
    if transfer.local is not None:
        target_box, source_box = transfer.local
        copies.append((result[target_box], local[source_box]))
    for target, part in copies:
        if add:
            target.add_(part)
        else:
            target.copy_(part)
    return result


def _split_as(parts: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """`flat` cut into consecutive tensors of the shapes of `parts`."""
    pieces = torch.split(flat, [part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
