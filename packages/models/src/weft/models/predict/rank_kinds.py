"""`check_plan`: proves that a training step of Weft's does not hang, from a few recorded ranks of each kind.

A kind is all ranks with the same position along "pp", and with positions of equal parts along each further axis. The
ranks of a kind issue the same calls. Positions along an axis have equal parts if, at each position along the further
axes, the ranks there hold the same shapes of every parameter and of the batch. Then, for two ranks of a kind, the
groups of the first and the groups of the second have, place by place, members of the same kinds, and the ranks of a
kind go through their calls in step: what is matched for a rank of each kind is matched for all ranks. Shapes alone are
not trusted to decide the calls: the first and the last rank of each kind are recorded. Where their calls differ (not
only parameters and batch are cut: a sum of 7 numbers over 64 ranks is cut unevenly, say), more ranks are recorded to
find the position where the calls change, and the kind is divided there.

Within a rank's step, the forward and the backward of a stage run for the first, the second and the last microbatch, and
the second's calls are copied for the microbatches between (`RepeatedActions`). The matched programs have the calls of
every microbatch, in the order of the schedule. Messages between stages are recorded, never copied. So the proof needs
a further fact: a stage issues the same calls for the copied microbatches as for the second. This holds for three
reasons: model and criterion are Weft's own code, whose calls follow from shapes alone; all collectives of the copied
action are awaited within the action, so nothing outside changes their order; and backward starts no sum of gradients.
Where a reason fails, or the last microbatch issues other calls than the second, every microbatch is run. Every block of
the model runs: unlike in `memory_parts`, no block stands for others.
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
from ..step.record import RecordedStep
from .hang_report import Hang
from .hangs import MOST_RANKS, CallRecorder, NoHang, find_hang
from .matching import CallOrWait, Issued, Program

# The most kinds with which `check_plan` still divides a kind; with more kinds, `check_plan` raises ValueError instead.
# Each kind costs runs on shapes of the first and the last rank.
MOST_KINDS = 512
Listen = Callable[[Recorded], None]  # `CallRecorder.listen`
ShapeAndLayout = tuple[tuple[int, ...], Layout]  # global shape and layout of a tensor


def check_plan(
    record_rank: Callable[[int, Listen], RecordedStep],
    mesh: ProcessMesh,
    plan: ParallelPlan,
    *,
    batch: tuple[int, int],
    most_ranks: int = MOST_RANKS,
) -> NoHang | Hang:
    """Prove that no rank of a training step of Weft's waits for another for ever, or return the first hang.

    record_rank: runs the step of a rank on shapes, with `listen` for `run_on_shapes`; called as (rank, listen).
    batch: (rows, tokens) of a microbatch, over all ranks.
    most_ranks: all ranks of a mesh up to this size are recorded; of a larger mesh, a few ranks of each kind.
    Checked: laying the model out, and a step with the collectives that Weft issues on NCCL, matched by the rules of
        gloo and of NCCL. Not checked: the checkpoint, the data, evaluation.
    Communication: none.
    Raises ValueError where a kind must be divided and there are already more than `MOST_KINDS` kinds.
    """
    if mesh.size <= most_ranks:
        return find_hang([_record(record_rank, mesh, rank)[0] for rank in sorted(mesh)])
    recorded: dict[int, Program] = {}
    tensors_of_stages: dict[int, list[ShapeAndLayout]] = {}
    for index in range(_size(mesh, PIPELINE_AXIS)):
        rank = _ranks_of_stage(mesh, index)[0]
        recorded[rank], step = _record(record_rank, mesh, rank)
        layouts = ((step.shapes[name], layout) for name, layout in step.layouts.items())
        tensors_of_stages[index] = list(
            dict.fromkeys((shape, layout) for shape, layout in layouts if layout is not None)
        )
    kind_at = _equal_positions(mesh, plan, tensors_of_stages, batch)
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
        _refine_parts(kind_at, mesh, plan, tensors_of_stages)
    programs = [kinds.relabel(recorded[rank]) for rank in kinds.ends]
    found = find_hang(programs, ranks=mesh.size, kinds=len(programs))
    return replace(found, recorded=len(recorded)) if isinstance(found, NoHang) else found


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Compares the calls of ranks alike in `kinds`; records the ranks needed."""

    record_rank: Callable[[int, Listen], RecordedStep]
    mesh: ProcessMesh
    kinds: Kinds
    recorded: dict[int, Program]  # by rank; ranks are added

    def first_difference(self, first: int, last: int) -> tuple[str, int, int] | None:
        """Where the calls change between the first and the last rank of a kind; None where both issue the same calls.

        Returns (axis, position of `first` along the axis, position along the axis where other calls begin).
        """
        if self._events(first) == self._events(last):
            return None
        place, target = self._coordinate(first), self._coordinate(last)
        for axis in place:
            moved = {**place, axis: target[axis]}
            if self._events_at(moved) == self._events_at(place):
                place = moved
                continue
            low, high = place[axis], target[axis]  # the calls at `low` are those of `first`, at `high` not
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

    def _events_at(self, place: Mapping[str, int]) -> tuple[CallOrWait, ...]:
        return self._events(self.mesh.rank_at(**place))

    def _events(self, rank: int) -> tuple[CallOrWait, ...]:
        if rank not in self.recorded:
            self.recorded[rank] = _record(self.record_rank, self.mesh, rank)[0]
        return self.kinds.relabel(self.recorded[rank]).events


def _divide(kind_at: dict[str, list[int]], axis: str, first: int, position: int) -> None:
    """From `position` on, the positions along `axis` alike to `first` become a kind of their own. Changes `kind_at`.

    `position` itself may be of a further kind, whose name the new kind must not get.
    """
    kind = kind_at[axis][first]
    new_kind = kind_at[axis].index(kind, position)
    kind_at[axis] = [new_kind if each == kind and i >= position else each for i, each in enumerate(kind_at[axis])]


def _record(
    record_rank: Callable[[int, Listen], RecordedStep], mesh: ProcessMesh, rank: int
) -> tuple[Program, RecordedStep]:
    # call sites are searched only in frames below this function
    recorder = CallRecorder(mesh.size, _record.__code__)
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
    """The kinds of a mesh's ranks. A kind's name is the kind's first rank."""

    first: Mapping[int, int]  # rank -> the first rank of the rank's kind
    # New names of groups, by the old name without ranks, the members' distances from the group's first rank, and the
    # members' kinds; filled by `relabel`.
    groups: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str]

    @classmethod
    def of(cls, mesh: ProcessMesh, kind_at: Mapping[str, Sequence[int]]) -> Kinds:
        """Make the kinds: ranks with the same position along "pp" and alike positions along each further axis.

        kind_at: for each axis but "pp", at each position the first position alike; [0, 0, 2] at size 3, say.
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
        """The first rank of each kind -> the kind's last rank."""
        return {first: rank for rank, first in sorted(self.first.items())}

    def relabel(self, program: Program) -> Program:
        """The program with each rank replaced by the first rank of the rank's kind, and groups renamed to match.

        Programs of two ranks of a kind are equal afterwards, if the ranks issue the same calls.
        """
        known: dict[Issued, Issued] = {}
        places: dict[str, tuple[int, ...]] = {}  # of each group after relabelling, the group's ranks before
        events: list[CallOrWait] = []
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
        """The parts of an all-to-all, with this rank's part to itself replaced by a part for a rank of the same kind.

        A rank often sends itself nothing. This 0 is at a different place for each rank of a kind.
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
    mesh: ProcessMesh,
    plan: ParallelPlan,
    tensors_of_stages: Mapping[int, Sequence[ShapeAndLayout]],
    batch: tuple[int, int],
) -> dict[str, list[int]]:
    """Which positions along an axis hold equal parts, as `kind_at` of `Kinds.of`.

    tensors_of_stages: by position along "pp", the parameters of the stage there. batch: as for `check_plan`.
    """
    axes = [axis for axis in mesh.axis_names if axis != PIPELINE_AXIS]
    kind_at: dict[str, list[int]] = {axis: [0] * mesh.axis_size(axis) for axis in axes}
    shapes = _uneven_shapes(mesh, tensors_of_stages, batch)
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
    _refine_parts(kind_at, mesh, plan, tensors_of_stages)
    return kind_at


def _refine_parts(
    kind_at: dict[str, list[int]],
    mesh: ProcessMesh,
    plan: ParallelPlan,
    tensors_of_stages: Mapping[int, Sequence[ShapeAndLayout]],
) -> None:
    """Apply `_refine` to each of the `_axes_in_parts`. Changes `kind_at`."""
    for folded, size in _axes_in_parts(mesh, plan, tensors_of_stages):
        _refine(kind_at, folded, size)


def _uneven_shapes(
    mesh: ProcessMesh, tensors_of_stages: Mapping[int, Sequence[ShapeAndLayout]], batch: tuple[int, int]
) -> dict[int, tuple[int, ...]]:
    """By rank, the local sizes of all parameters and batches that are cut unevenly; {} where all are cut evenly."""
    found: dict[int, tuple[int, ...]] = {}
    uneven_anywhere = False
    for index, tensors in tensors_of_stages.items():
        ranks = _ranks_of_stage(mesh, index)
        rows: list[ShapeAndLayout] = []
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


def _axes_in_parts(
    mesh: ProcessMesh, plan: ParallelPlan, tensors_of_stages: Mapping[int, Sequence[ShapeAndLayout]]
) -> list[tuple[tuple[str, ...], int]]:
    """Axes on which some groups span a part of the axis only: (the axes, consecutive ranks in a part).

    "ep" cuts the axes folded into "ep" into parts. Key heads fewer than the ranks along "tp" cut "tp" into parts.
    """
    in_parts = []
    if plan.experts is not None:
        folded = tuple(axis for axis in folded_axes(mesh, plan.experts) if mesh.axis_size(axis) > 1)
        in_parts.append((folded, plan.experts.size))
    meshes = {layout.mesh for tensors in tensors_of_stages.values() for _, layout in tensors}
    copies = {each.axis_size(COPIES_AXIS) for each in meshes if COPIES_AXIS in each.axis_names}
    return in_parts + [((TENSOR_AXIS,), size) for size in sorted(copies)]


def _refine(kind_at: dict[str, list[int]], folded: Sequence[str], size: int) -> None:
    """Split alike positions whose groups, within a part or across parts, have members of different kinds.

    With several axes in `folded`, and more than one kind on any, each position of all these axes becomes a kind of its
    own.
    kind_at: as for `Kinds.of`; changed. folded, size: an item of `_axes_in_parts`.
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
    """The axes that cut a row's tokens, where `tokens` cannot be cut evenly: each position is then a kind of its own.

    Over "cp" there are twice as many parts as ranks: each rank has an early and a late part.
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
