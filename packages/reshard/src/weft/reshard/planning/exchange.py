"""The messages of an exchange: the step from any layout to any layout, on the same mesh or on another mesh.

A rank lacks the elements of the target part outside the source part. Each missing piece is sent by a single
holder: the least loaded of the nearest holders. All messages follow from the layouts and the shape, and every rank
computes the same messages. A rank holds a single box of the tensor, and needs a single box. Therefore a rank sends at
most a single box to each receiver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from weft.mesh import Layout
from weft.mesh.extension import Box, overlap, volume

from .layouts import moved_axes, spec_of


@dataclass(frozen=True, slots=True)
class Messages:
    """The boxes of the global tensor sent, received and kept by a rank."""

    sends: tuple[tuple[int, Box], ...]  # (receiver, box), in the order of receivers
    receives: tuple[tuple[int, Box], ...]  # (sender, box), in the order of senders
    local: Box | None  # the box both held and needed by the rank

    def reversed(self) -> Messages:
        """The same messages in the opposite direction: a ReduceExchange sends the messages of its dual this way."""
        return Messages(self.receives, self.sends, self.local)

    @property
    def sent_elements(self) -> int:
        return sum(volume(box) for _, box in self.sends)

    @property
    def received_elements(self) -> int:
        return sum(volume(box) for _, box in self.receives)


def exchange_axes(src: Layout, dst: Layout) -> tuple[str, ...]:
    """The axes over which an exchange between two layouts of the same mesh moves data.

    Along the remaining axes, no rank needs anything from another.
    """
    ndim = max((*src.shard_order, *dst.shard_order), default=-1) + 1
    axes = moved_axes(spec_of(src, ndim), spec_of(dst, ndim))
    return tuple(axis for axis in src.mesh.axis_names if axis in axes)


def exchange_members(src: Layout, dst: Layout, rank: int) -> tuple[int, ...]:
    """The members of the exchange's process group on `rank`, ascending, `rank` included.

    On one mesh, the sub-mesh of `rank` along `exchange_axes`. Between two meshes, the ranks of both.
    """
    if src.mesh != dst.mesh:
        return tuple(sorted({*src.mesh.ranks, *dst.mesh.ranks}))
    axes = exchange_axes(src, dst)
    group = src.mesh.submesh(rank, *axes) if axes else None
    return (rank,) if group is None else tuple(sorted(group))


@lru_cache(maxsize=4096)
def messages_of(src: Layout, dst: Layout, shape: tuple[int, ...], rank: int) -> Messages:
    """The messages of `rank` in the exchange from `src` to `dst`, for the executor of the step and for its costs.

    Time: proportional to the number of members. Where several ranks hold the same elements, proportional to the number
    of messages of all members, because the load of each sender decides who sends.
    """
    if rank not in src.mesh and rank not in dst.mesh:
        return Messages((), (), None)
    group = exchange_members(src, dst, rank)
    cells = _cells_of(src, shape, group)
    if cells.replicated:
        return _all_messages(src, dst, shape, group).get(rank, Messages((), (), None))
    sends, receives, local = [], [], None
    if rank in dst.mesh:
        for holders, box in cells.overlapping(dst.local_slices(shape, rank)):
            if holders[0] == rank:
                local = box
            else:
                receives.append((holders[0], box))
    if rank in src.mesh:
        held = src.local_slices(shape, rank)
        for receiver in group:
            if receiver != rank and receiver in dst.mesh:
                piece = overlap(held, dst.local_slices(shape, receiver))
                if volume(piece):
                    sends.append((receiver, piece))
    return Messages(tuple(sorted(sends, key=_rank)), tuple(sorted(receives, key=_rank)), local)


@lru_cache(maxsize=64)
def _all_messages(src: Layout, dst: Layout, shape: tuple[int, ...], group: tuple[int, ...]) -> dict[int, Messages]:
    """Every rank's messages, where a piece has several holders: the least loaded of the nearest sends the piece."""
    cells = _cells_of(src, shape, group)
    load: dict[int, int] = defaultdict(int)
    sends: dict[int, list[tuple[int, Box]]] = defaultdict(list)
    receives: dict[int, list[tuple[int, Box]]] = defaultdict(list)
    local: dict[int, Box] = {}
    pieces = [
        (receiver, holders, box)
        for receiver in group
        if receiver in dst.mesh
        for holders, box in cells.overlapping(dst.local_slices(shape, receiver))
    ]
    for receiver, holders, box in pieces:
        if receiver in holders:
            local[receiver] = box
            continue
        nearest = _nearest(src, dst, receiver, holders)
        sender = min(nearest, key=lambda holder: load[holder])
        load[sender] += volume(box)
        sends[sender].append((receiver, box))
        receives[receiver].append((sender, box))
    return {
        rank: Messages(tuple(sorted(sends[rank], key=_rank)), tuple(sorted(receives[rank], key=_rank)), local.get(rank))
        for rank in group
    }


def _nearest(src: Layout, dst: Layout, receiver: int, holders: Sequence[int]) -> list[int]:
    """The holders with the most outer axes in common with the receiver, because inner axes have the fast links.

    Between two meshes, all holders.
    """
    if src.mesh != dst.mesh:
        return list(holders)
    receiver_index = list((src.mesh.coordinate(receiver) or {}).values())
    depths = []  # for each holder, the number of outer axes in common
    for holder in holders:
        holder_index = list((src.mesh.coordinate(holder) or {}).values())
        equal = [a == b for a, b in zip(receiver_index, holder_index, strict=True)]
        depths.append(equal.index(False) if False in equal else len(equal))
    return [holder for holder, depth in zip(holders, depths, strict=True) if depth == max(depths)]


class _Cells:
    """The boxes that a layout cuts a tensor into, and the ranks that hold each box."""

    def __init__(self, layout: Layout, shape: tuple[int, ...], ranks: Sequence[int]) -> None:
        self._holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank in ranks:
            if rank in layout.mesh:
                box = layout.local_slices(shape, rank)
                if volume(box):
                    self._holders.setdefault(tuple((part.start, part.stop) for part in box), []).append(rank)
        self._intervals = [sorted({cell[dim] for cell in self._holders}) for dim in range(len(shape))]
        self.replicated = any(len(ranks) > 1 for ranks in self._holders.values())

    def overlapping(self, box: Box) -> Iterator[tuple[list[int], Box]]:
        """The non-empty pieces of `box`, each with its holders."""
        if not volume(box):
            return
        overlapping_cuts = [
            [cut for cut in cuts if cut[0] < part.stop and part.start < cut[1]]
            for cuts, part in zip(self._intervals, box, strict=True)
        ]
        for cell in product(*overlapping_cuts):
            piece = tuple(
                slice(max(start, part.start), min(stop, part.stop))
                for (start, stop), part in zip(cell, box, strict=True)
            )
            yield self._holders[cell], piece


@lru_cache(maxsize=64)
def _cells_of(layout: Layout, shape: tuple[int, ...], ranks: tuple[int, ...]) -> _Cells:
    return _Cells(layout, shape, ranks)


def _rank(message: tuple[int, Box]) -> int:
    return message[0]


def contiguous_run(boxes: Iterable[Box], outer: Box) -> slice | None:
    """The range of memory that the boxes fill without gaps: boxes with a range are sent or received without a copy.

    outer: the box of a rank's local tensor, of which the boxes are parts. The slice counts elements of this row-major
        tensor.
    None where a box is not contiguous in memory, where a box does not begin at the end of the previous box, and for no
    boxes.
    """
    start = end = None
    for box in boxes:
        offset, is_cut = 0, False
        for part, o in zip(box, outer, strict=True):
            extent, size = part.stop - part.start, o.stop - o.start
            if is_cut and extent != size:
                return None
            is_cut = is_cut or extent > 1
            offset = offset * size + part.start - o.start
        if end is None:
            start = offset
        elif offset != end:
            return None
        end = offset + volume(box)
    return None if start is None else slice(start, end)


def relative_box(box: Box, outer: Box) -> Box:
    """`box`, given in indices of the global tensor, as slices of the local tensor that holds the box `outer`."""
    return tuple(slice(part.start - o.start, part.stop - o.start) for part, o in zip(box, outer, strict=True))
