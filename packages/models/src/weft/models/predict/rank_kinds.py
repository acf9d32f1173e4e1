"""Which ranks of a mesh issue the same calls, so that a few of each kind are recorded and stand for all: `check_plan`.

Ranks are of a kind if they are at the same position along "pp" and at positions alike along each other axis. Positions
along an axis are alike if the ranks there have parts of the same shapes of every parameter and of the batch, whatever
their positions along the other axes. Each group of a rank then has, place by place, members of the same kinds as the
same group of any rank of the kind, and the ranks of a kind go through their calls in step: what is matched for one of
each kind is matched for all. That the calls depend on these shapes alone is not taken for granted: the first and the
last rank of each kind are recorded, and where they issue other calls (a sum of 7 numbers over 64 ranks is cut unevenly,
too) further ranks are recorded to find the position from which they differ, and the kind is divided there.

Within a rank's step, the forward and the backward of a stage run for the first, the second and the last microbatch, and
the second's calls stand for those between (`RepeatedActions`). The programs that are matched have the calls of every
microbatch, in the order of the schedule, and all messages between stages are recorded, none is copied. So the proof
needs one fact more: that the calls of a stage for the microbatches between are those for the second. They are, because
model and criterion are Weft's own code, whose calls follow from shapes alone; because all collectives of the copied
action are awaited within it, so that nothing outside changes their order; and because backward starts no sum of
gradients. Where one of the three does not hold, and where the last microbatch issues other calls than the second, every
microbatch is run. Blocks are never copied within a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.mesh import Layout, ProcessMesh, Shard
from weft.reshard.extension import Recorded

from ..parallel.experts.placement import folded_axes
from ..parallel.parameter_layouts import COPIES_AXIS
from ..parallel.plan import ParallelPlan
from ..parallel.styles import CONTEXT_AXIS, DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS
from ..step.record import Step
from .hang_report import Hang
from .hangs import MOST_RANKS, NoHang, Recorder, find_hang
from .matching import Event, Issued, Program

MOST_KINDS = 512
Listen = Callable[[Recorded], None]
Part = tuple[tuple[int, ...], Layout]  # global shape and layout of a tensor


def check_plan(
    record_rank: Callable[[int, Listen], Step],
    mesh: ProcessMesh,
    plan: ParallelPlan,
    *,
    batch: tuple[int, int],
    most_ranks: int = MOST_RANKS,
) -> NoHang | Hang:
    """Prove that no rank of a training step of Weft's waits for another for ever, or return the first hang.

    record_rank: runs the step of a rank on shapes; called with the rank and the `listen` of `run_on_shapes`.
    batch: (rows, tokens) of a microbatch, over all ranks.
    most_ranks: up to which all ranks are recorded; on a larger mesh a few ranks of each kind.
    Recorded are the layout of the model and a step as on NCCL. Not part of it: the checkpoint, the data, evaluation.
    Communication: none. Raises ValueError for a larger mesh whose ranks are of more than `MOST_KINDS` kinds.
    """
    if mesh.size <= most_ranks:
        return find_hang([_record(record_rank, mesh, rank)[0] for rank in sorted(mesh)])
    recorded: dict[int, Program] = {}
    parts: dict[int, list[Part]] = {}
    for index in range(_size(mesh, PIPELINE_AXIS)):
        rank = _ranks_of_stage(mesh, index)[0]
        recorded[rank], step = _record(record_rank, mesh, rank)
        layouts = ((step.shapes[name], layout) for name, layout in step.layouts.items())
        parts[index] = list(dict.fromkeys((shape, layout) for shape, layout in layouts if layout is not None))
    kind_at = _equal_positions(mesh, plan, parts, batch)
    while True:
        kinds = Kinds.of(mesh, kind_at)
        comparison = _Comparison(record_rank, mesh, kinds, recorded)
        difference = next(filter(None, (comparison.first_difference(*ends) for ends in kinds.ends.items())), None)
        if difference is None:
            break
        if len(kinds.ends) > MOST_KINDS:
            raise ValueError(
                f"the ranks of {mesh} are of more than {MOST_KINDS} kinds; check a smaller mesh with the same axes, of "
                f"up to {most_ranks} ranks, where all ranks are recorded"
            )
        _divide(kind_at, *difference)
        _refine_divided(kind_at, mesh, plan, parts)
    programs = [kinds.relabel(recorded[rank]) for rank in kinds.ends]
    found = find_hang(programs, ranks=mesh.size, kinds=len(programs))
    return replace(found, recorded=len(recorded)) if isinstance(found, NoHang) else found


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Compares the calls of ranks that seem of a kind; records the ranks that it needs."""

    record_rank: Callable[[int, Listen], Step]
    mesh: ProcessMesh
    kinds: Kinds
    recorded: dict[int, Program]

    def first_difference(self, first: int, last: int) -> tuple[str, int, int] | None:
        """Where ranks of a kind issue other calls than `first`: an axis, the position of `first` along it, and the
        position from which they do. None where `last` issues the same.
        """
        if self._events(first) == self._events(last):
            return None
        place, target = self._coordinate(first), self._coordinate(last)
        for axis in place:
            moved = {**place, axis: target[axis]}
            if self._events_at(moved) == self._events_at(place):
                place = moved
                continue
            low, high = place[axis], target[axis]  # the calls at `low` are those of `first`, at `high` they are not
            while high - low > 1:
                middle = (low + high) // 2
                same = self._events_at({**place, axis: middle}) == self._events_at(place)
                low, high = (middle, high) if same else (low, middle)
            return axis, place[axis], high
        raise AssertionError("the calls differ between two places, so they differ on the way from one to the other")

    def _coordinate(self, rank: int) -> dict[str, int]:
        coordinate = self.mesh.coordinate(rank)
        assert coordinate is not None, "the rank is one of the mesh"
        return coordinate

    def _events_at(self, place: Mapping[str, int]) -> tuple[Event, ...]:
        return self._events(self.mesh.rank_at(**place))

    def _events(self, rank: int) -> tuple[Event, ...]:
        if rank not in self.recorded:
            self.recorded[rank] = _record(self.record_rank, self.mesh, rank)[0]
        return self.kinds.relabel(self.recorded[rank]).events


def _divide(kind_at: dict[str, list[int]], axis: str, first: int, position: int) -> None:
    """Tell the positions along an axis from `position` on apart from those alike to `first`."""
    kind = kind_at[axis][first]
    kind_at[axis] = [position if each == kind and i >= position else each for i, each in enumerate(kind_at[axis])]


def _record(record_rank: Callable[[int, Listen], Step], mesh: ProcessMesh, rank: int) -> tuple[Program, Step]:
    recorder = Recorder(mesh.size, _record.__code__)
    step = record_rank(rank, recorder.listen)
    return Program(rank, tuple(recorder.events)), step


def _size(mesh: ProcessMesh, axis: str) -> int:
    return mesh.axis_size(axis) if axis in mesh.axis_names else 1


def _ranks_of_stage(mesh: ProcessMesh, index: int) -> tuple[int, ...]:
    """The ranks at a position along "pp"; all ranks on a mesh without the axis."""
    if PIPELINE_AXIS not in mesh.axis_names:
        return tuple(mesh)
    return tuple(mesh.select(**{PIPELINE_AXIS: index}))


@dataclass(frozen=True, slots=True)
class Kinds:
    """The kinds of a mesh's ranks."""

    first: Mapping[int, int]  # of each rank, the first rank of its kind
    groups: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str]  # names by purpose, distances and kinds of members

    @classmethod
    def of(cls, mesh: ProcessMesh, kind_at: Mapping[str, Sequence[int]]) -> Kinds:
        """The kinds of the ranks of a mesh.

        kind_at: by axis other than "pp", the first position alike to each position.
        """
        first: dict[tuple[int, ...], int] = {}
        of_rank = {}
        for rank in sorted(mesh):
            place = mesh.coordinate(rank) or {}
            kind = (place.get(PIPELINE_AXIS, 0), *(positions[place[axis]] for axis, positions in kind_at.items()))
            of_rank[rank] = first.setdefault(kind, rank)
        return cls(of_rank, {})

    @property
    def ends(self) -> dict[int, int]:
        """The first and the last rank of each kind."""
        return {first: rank for rank, first in sorted(self.first.items())}

    def relabel(self, program: Program) -> Program:
        """A rank's program with the first rank of a kind in place of each rank of it."""
        known: dict[Issued, Issued] = {}
        places: dict[str, tuple[int, ...]] = {}  # of each group after relabelling, the group's ranks before
        events: list[Event] = []
        for event in program.events:
            if isinstance(event, Issued) and event not in known:
                known[event] = self._relabel_call(event, program.rank)
                ranks = tuple(sorted(event.members))
                assert places.setdefault(known[event].group, ranks) == ranks, "a rank has one group of each name"
            events.append(known[event] if isinstance(event, Issued) else event)
        return Program(self.first[program.rank], tuple(events))

    def _relabel_call(self, call: Issued, rank: int) -> Issued:
        ranks = sorted(call.members)
        purpose = call.group.removesuffix(" ".join(map(str, ranks)))
        key = purpose, tuple(each - ranks[0] for each in ranks), tuple(self.first[each] for each in ranks)
        name = self.groups.setdefault(key, f"{purpose}{len(self.groups)}")
        peer = None if call.peer is None else self.first[call.peer]
        return replace(
            call,
            group=name,
            members=tuple(self.first[each] for each in call.members),
            peer=peer,
            sent=self._parts_by_kind(call, call.sent, rank),
            received=self._parts_by_kind(call, call.received, rank),
        )

    def _parts_by_kind(self, call: Issued, parts: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The parts of an all-to-all, in which this rank's own part has the size of those of other ranks of its kind.

        A rank often keeps its own part, of size 0 here, which is at another place for each rank of a kind.
        """
        if not parts:
            return parts
        parts_of_kind = (
            part
            for member, part in zip(call.members, parts, strict=True)
            if member != rank and self.first[member] == self.first[rank]
        )
        own = next(parts_of_kind, 0)
        return tuple(own if member == rank else part for member, part in zip(call.members, parts, strict=True))


def _equal_positions(
    mesh: ProcessMesh, plan: ParallelPlan, parts: Mapping[int, Sequence[Part]], batch: tuple[int, int]
) -> dict[str, list[int]]:
    """By axis other than "pp", the first position alike to each position.

    parts: of each position along "pp", the parameters of the ranks there. batch: as for `check_plan`.
    """
    axes = [axis for axis in mesh.axis_names if axis != PIPELINE_AXIS]
    kind_at: dict[str, list[int]] = {axis: [0] * mesh.axis_size(axis) for axis in axes}
    shapes = _uneven_shapes(mesh, parts, batch)
    if shapes:
        coordinates = {rank: mesh.coordinate(rank) or {} for rank in mesh}
        for axis in axes:
            shapes_at: dict[int, list[tuple[int, ...]]] = {}
            for rank, place in coordinates.items():
                shapes_at.setdefault(place[axis], []).append(shapes[rank])
            of_kind: dict[tuple[tuple[int, ...], ...], int] = {}
            kind_at[axis] = [of_kind.setdefault(tuple(shapes_at[i]), i) for i in range(mesh.axis_size(axis))]
    for axis in _axes_of_uneven_tokens(mesh, plan, batch[1]):
        kind_at[axis] = list(range(mesh.axis_size(axis)))
    _refine_divided(kind_at, mesh, plan, parts)
    return kind_at


def _refine_divided(
    kind_at: dict[str, list[int]], mesh: ProcessMesh, plan: ParallelPlan, parts: Mapping[int, Sequence[Part]]
) -> None:
    """`_refine` along all axes along which some groups have a part of the ranks."""
    for folded, size in _divided_axes(mesh, plan, parts):
        _refine(kind_at, folded, size)


def _uneven_shapes(
    mesh: ProcessMesh, parts: Mapping[int, Sequence[Part]], batch: tuple[int, int]
) -> dict[int, tuple[int, ...]]:
    """The sizes of each rank's parts of tensors that cannot be cut evenly; {} where all can."""
    found: dict[int, tuple[int, ...]] = {}
    uneven_anywhere = False
    for index, tensors in parts.items():
        ranks = _ranks_of_stage(mesh, index)
        rows: list[Part] = []
        if DATA_AXIS in mesh.axis_names:
            rows = [(batch, Layout(mesh, {DATA_AXIS: Shard(0)}))]
        uneven = [each for each in (*tensors, *rows) if _is_uneven(*each)]
        uneven_anywhere = uneven_anywhere or bool(uneven)
        for rank in ranks:
            found[rank] = tuple(size for shape, layout in uneven for size in _local_shape(shape, layout, rank))
    return found if uneven_anywhere else {}


def _is_uneven(shape: Sequence[int], layout: Layout) -> bool:
    return any(size % layout.parts(dim) for dim, size in enumerate(shape))


def _local_shape(shape: Sequence[int], layout: Layout, rank: int) -> Iterable[int]:
    return layout.local_shape(shape, rank) if rank in layout.mesh else (-1,) * len(shape)


def _divided_axes(
    mesh: ProcessMesh, plan: ParallelPlan, parts: Mapping[int, Sequence[Part]]
) -> list[tuple[tuple[str, ...], int]]:
    """The axes along which some groups have a part of the ranks, and how many consecutive ranks a part has.

    "ep" divides the axes that it folds; key heads that are fewer than the ranks along "tp" divide "tp".
    """
    divided = []
    if plan.experts is not None:
        folded = tuple(axis for axis in folded_axes(mesh, plan.experts) if mesh.axis_size(axis) > 1)
        divided.append((folded, plan.experts.size))
    meshes = {layout.mesh for tensors in parts.values() for _, layout in tensors}
    copies = {each.axis_size(COPIES_AXIS) for each in meshes if COPIES_AXIS in each.axis_names}
    return divided + [((TENSOR_AXIS,), size) for size in sorted(copies)]


def _refine(kind_at: dict[str, list[int]], folded: Sequence[str], size: int) -> None:
    """Tell positions apart whose groups have members of other kinds, where groups have parts of an axis.

    kind_at: by axis, the first position alike to each position; changed. size: consecutive ranks in a part.
    """
    if all(len(set(kind_at[axis])) == 1 for axis in folded):
        return
    if len(folded) > 1:
        for axis in folded:
            kind_at[axis] = list(range(len(kind_at[axis])))
        return
    (axis,) = folded
    while True:
        kinds, first = kind_at[axis], dict[tuple[object, ...], int]()
        refined = []
        for i, kind in enumerate(kinds):
            start = i - i % size
            key = (kind, tuple(kinds[start : start + size]), tuple(kinds[i % size :: size]))
            refined.append(first.setdefault(key, i))
        if len(set(refined)) == len(set(kinds)):
            return
        kind_at[axis] = refined


def _axes_of_uneven_tokens(mesh: ProcessMesh, plan: ParallelPlan, tokens: int) -> set[str]:
    """The axes over which the tokens of a row cannot be cut evenly: all their positions are kinds of their own.

    Over "cp" the tokens are cut in twice as many parts as ranks, of which each rank has an early and a late one.
    """
    cut = {
        axis: size
        for axis, size in ((CONTEXT_AXIS, 2 * _size(mesh, CONTEXT_AXIS)), (TENSOR_AXIS, _size(mesh, TENSOR_AXIS)))
        if axis in mesh.axis_names and (axis != TENSOR_AXIS or plan.sequence)
    }
    parts = 1
    for size in cut.values():
        parts *= size
    return set(cut) if tokens % parts else set()
