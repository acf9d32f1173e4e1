"""Plans: the steps from a source layout to a target layout, as a value to price, print, draw and transpose.

Between two meshes (`cheapest_across`), a Partial source is first reduced to shards on the source mesh. Each shard is
then sent once, to a single rank of the target mesh. Last, the ranks of the target mesh gather the elements needed by
several of these ranks. Where the meshes share ranks, sending every rank all missing elements may take fewer bytes,
because ranks keep the elements held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Any

import torch
from weft.mesh import Layout, LayoutError, Partial, Replicate, Shard
from weft.mesh.extension import WIDTH as PICTURE_WIDTH
from weft.mesh.extension import as_int, as_shape, coloured, draw

from .costs import lower_bound_elements, peak_elements, received_elements, seconds_of
from .exchange import messages_of
from .layouts import check_reductions, drop_trivial_axes, dual_layout, replicate_partials
from .moves import Links
from .search import Fits, cheapest
from .steps import Exchange, MakePartial, Relabel, Step, Targeted, dual, layout_after

Shape = tuple[int, ...]


WIDTH = 105  # default columns of an explanation: room for two pictures of 48 columns side by side
INDENT = "   "  # before each line of a picture

MOST_LISTED = 16  # ranks at most whose bytes are listed rank by rank


@dataclass(frozen=True)
class Plan:
    """The steps from the layout `src` of a tensor to the layout `dst`; made by `plan()`, the same on every rank."""

    src: Layout  #: the layout before the first step
    dst: Layout  #: the layout after the last step
    shape: tuple[int, ...]  #: of the global tensor
    dtype: torch.dtype  #: of the tensor
    steps: tuple[Step, ...]  #: in order; empty where no rank has anything to do
    topology: Links | None = None  #: the links assumed by the search; None: outer axes count as slower

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: the cached hash differs between processes."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def _hash(self) -> int:
        return hash((self.src, self.dst, self.shape, self.dtype, self.steps, self.topology))

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout before each step."""
        layouts = [drop_trivial_axes(self.src)]
        for step in self.steps:
            layouts.append(layout_after(step, layouts[-1]))
        return tuple(layouts[:-1])

    def __str__(self) -> str:
        way = ", ".join(_step_text(step, layout) for step, layout in zip(self.steps, self.layouts, strict=True))
        return f"({self.src}) -> ({self.dst}) of {self.dtype} {self.shape}: {way or 'nothing to do'}"

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both meshes, ascending."""
        return tuple(sorted({*self.src.mesh.ranks, *self.dst.mesh.ranks}))

    def received_bytes(self, rank: int) -> int:
        """Bytes received by `rank` from other ranks; `costs.py` states the algorithms counted."""
        return self.dtype.itemsize * sum(self._each(received_elements, rank))

    @cached_property
    def max_received_bytes(self) -> int:
        """Bytes received by the busiest rank. Cost: computes the bytes of all ranks."""
        return max(self.received_bytes(rank) for rank in self.ranks)

    @cached_property
    def lower_bound_bytes(self) -> int:
        """A bound from below: under any plan, some rank receives at least this number of bytes; see `costs.py`."""
        return self.dtype.itemsize * lower_bound_elements(
            drop_trivial_axes(self.src), drop_trivial_axes(self.dst), self.shape
        )

    @cached_property
    def peak_bytes(self) -> int:
        """Most bytes alive at the same time on a rank: the source, a step's input, result and buffers.

        The source counts throughout, because the caller holds the source, and is assumed to be contiguous.
        """
        return self.dtype.itemsize * max(self._peak_elements_of(rank) for rank in self.ranks)

    def _peak_elements_of(self, rank: int) -> int:
        """Elements alive at the same time on `rank`."""
        source = math.prod(self.src.local_shape(self.shape, rank))
        peaks = self._each(peak_elements, rank)
        return max([source, *peaks[:1], *(source + peak for peak in peaks[1:])])

    @property
    def seconds(self) -> float:
        """Predicted time of the transfers, by the plan's topology.

        Raises ValueError for a plan made without a topology.
        """
        if self.topology is None:
            raise ValueError(
                "this plan was made without a topology, so its time is unknown; give plan(..., topology=Topology(...))"
            )
        return sum(
            seconds_of(step, layout, self.shape, self.dtype.itemsize, self.topology)
            for step, layout in zip(self.steps, self.layouts, strict=True)
        )

    def transpose(self) -> Plan:
        """The plan of the gradients, from the result's gradient to the source's: the dual of each step, in reverse.

        The gradient of a replicated value is Partial("sum"), and the gradient of a Partial("sum") value is replicated.
        The transpose of the transpose is an equal plan. Raises LayoutError for reductions other than sums.
        """
        steps = (dual(step, layout) for step, layout in zip(self.steps, self.layouts, strict=True))
        src, dst = dual_layout(self.dst), dual_layout(self.src)
        return Plan(src, dst, self.shape, self.dtype, tuple(steps)[::-1], self.topology)

    def explain(self, *, width: int = WIDTH) -> str:
        """The plan as text: bytes against the bound, peak memory, predicted seconds, the layouts around each step.

        width: the columns into which the pictures should fit. Pictures too wide to stand side by side stand one below
            another.
        """
        lines = [*self._figures(), *_picture_lines(self.steps, self.layouts, self.shape, self.dtype.itemsize, width)]
        if not self.steps:
            lines += ["nothing to do", *draw(self.src, self.shape, width=width)]
        return "\n".join(lines)

    def _figures(self) -> list[str]:
        """The lines above the steps: layouts, bytes, peak memory, and seconds where there is a topology."""
        received, bound = self.max_received_bytes, self.lower_bound_bytes
        gap = "as few as any plan" if received == bound else f"at least {bound:,} by the bound"
        if bound and received != bound:
            gap += f", {received / bound:.2f} times that"
        there = f" -> {self.dst.mesh}" if self.src.mesh != self.dst.mesh else ""
        return [
            f"({self.src}) -> ({self.dst})",
            f"{self.dtype} {self.shape} on {self.src.mesh}{there}",
            f"received by the busiest rank: {received:,} bytes, {gap}",
            *self._bytes_by_rank(),
            f"alive at once on a rank: {self.peak_bytes:,} bytes at most",
            *([] if self.topology is None else [f"predicted time: {1e6 * self.seconds:,.1f} us"]),
        ]

    def _bytes_by_rank(self) -> list[str]:
        """A line with the bytes received by each rank. No line if all are equal, or for more than MOST_LISTED ranks."""
        received = {rank: self.received_bytes(rank) for rank in self.ranks[:MOST_LISTED]}
        if len(self.ranks) > MOST_LISTED or len(set(received.values())) == 1:
            return []
        listed = ", ".join(f"rank {rank} {count:,}" for rank, count in received.items())
        return [f"received by each: {listed} bytes"]

    def __rich__(self) -> Any:
        """What `rich.print(plan)` shows: the text of `explain()`, in colour where the terminal has it."""
        return coloured(self.explain())

    def _each(self, cost: Callable[[Step, Layout, Sequence[int], int], int], rank: int) -> list[int]:
        """The cost of each step on `rank`."""
        return [cost(step, layout, self.shape, rank) for step, layout in zip(self.steps, self.layouts, strict=True)]


def plan(
    src: Layout,
    dst: Layout,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    topology: Links | None = None,
    memory_limit: int | None = None,
) -> Plan:
    """The plan from `src` to `dst` for a global tensor.

    Computed from global metadata alone, so every rank makes the same plan; cached by the arguments.

    topology: the links of the axes: the plan then has the fewest predicted seconds. None: the plan has the fewest
        bytes received by the busiest rank.
    memory_limit: bytes allowed to be alive at the same time on a rank: the source, a step's input, its result and
        buffers. None: no limit.
    Raises LayoutError where a layout shards a dim outside the shape, and where the reductions of the
    layouts cannot be combined or do not exist for the dtype.
    Raises LayoutError where every plan found exceeds the memory limit; ValueError for arguments of a wrong kind.
    """
    for name, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, Layout):
            raise ValueError(f"plan: {name} is {layout!r}; give a Layout, as Layout(mesh, 'dp: S(0)')")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"plan: dtype is {dtype!r}; give a torch.dtype, as torch.float32")
    check_limits(topology, memory_limit)
    sizes = tuple(shape) if isinstance(shape, torch.Size) else as_shape(shape)  # sizes of a torch.Size may be symbols
    return _plan(src, dst, sizes, dtype, topology, memory_limit)


def check_limits(topology: object, memory_limit: object) -> None:
    """Raises ValueError for a topology or a memory limit of a wrong kind. Called by `plan` and by `reshard`."""
    if topology is not None and not isinstance(topology, Links):
        raise ValueError(f"topology is {topology!r}; give a Topology, or None")
    if memory_limit is not None:
        as_int("memory_limit", memory_limit)


@lru_cache(maxsize=65536)
def _plan(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    topology: Links | None,
    memory_limit: int | None,
) -> Plan:
    src, dst = src.resolved(shape), dst.resolved(shape)
    if src.mesh != dst.mesh and _differ_only_in_axis_order(src, dst):
        dst = Layout(src.mesh, str(dst))
    peaks: list[int] = []

    def as_plan(steps: tuple[Step, ...]) -> Plan:
        return Plan(src, dst, shape, dtype, steps, topology)

    def fits(steps: tuple[Step, ...]) -> bool:
        peaks.append(as_plan(steps).peak_bytes)
        return memory_limit is None or peaks[-1] <= memory_limit

    start, end = drop_trivial_axes(src), drop_trivial_axes(dst)
    check_reductions(start, end, dtype)
    find = cheapest if src.mesh == dst.mesh else cheapest_across
    steps = find(
        start,
        end,
        shape,
        itemsize=dtype.itemsize,
        topology=topology,
        fits=None if memory_limit is None else fits,
    )
    if steps is None:
        raise LayoutError(
            f"no plan from ({src}) to ({dst}) for {dtype} {shape} stays within memory_limit={memory_limit} bytes "
            f"a rank; the leanest found needs {min(peaks)}"
        )
    return as_plan(steps)


def _differ_only_in_axis_order(src: Layout, dst: Layout) -> bool:
    """Whether the two meshes have the same axes and ranks, apart from the order of the axes."""
    names = src.mesh.axis_names
    return set(dst.mesh.axis_names) == set(names) and dst.mesh.permute(*names) == src.mesh


def _picture_lines(
    steps: Sequence[Step], layouts: Sequence[Layout], shape: tuple[int, ...], itemsize: int, width: int
) -> list[str]:
    """For each step, a line with the most bytes received by any rank, and pictures of the layouts around the step.

    layouts: the layout before each step. width: the columns that the pictures should fit in.
    """
    lines = []
    for number, (step, layout) in enumerate(zip(steps, layouts, strict=True), start=1):
        after = layout_after(step, layout)
        ranks = {*layout.mesh.ranks, *after.mesh.ranks}
        most = itemsize * max(received_elements(step, layout, shape, rank) for rank in ranks)
        lines += ["", f"{number}. {_step_text(step, layout)}: {most:,} bytes"]
        lines += [f"{INDENT}{line}".rstrip() for line in _join_pictures(layout, after, shape, width - len(INDENT))]
    return lines


def _step_text(step: Step, layout: Layout) -> str:
    """The step as code on a single line, without arguments at their defaults.

    A target is written as the placements, and the mesh where the step changes the mesh.
    """
    if isinstance(step, Targeted):
        there = "" if step.target.mesh == layout.mesh else f" on {step.target.mesh}"
        return f"{type(step).__name__}({step.target}{there})"
    values = [(f.name, getattr(step, f.name)) for f in fields(step) if getattr(step, f.name) != f.default]
    return f"{type(step).__name__}({', '.join(repr(v) if n == 'axis' else f'{n}={v!r}' for n, v in values)})"


def _join_pictures(before: Layout, after: Layout, shape: tuple[int, ...], width: int) -> list[str]:
    """The pictures of two layouts side by side; where `width` is too small, the second below the first."""
    left, right = (draw(layout, shape, width=min(width, PICTURE_WIDTH)) for layout in (before, after))
    room, middle = max(map(len, left)), min(len(left), len(right)) // 2
    if room + len("  ->  ") + max(map(len, right)) > width:
        return [*left, "->", *right]
    arrows = ["->" if row == middle else "  " for row in range(max(len(left), len(right)))]
    return [f"{a or '':{room}}  {arrow}  {b or ''}" for a, arrow, b in zip_longest(left, arrows, right, fillvalue="")]


def cheapest_across(
    src: Layout, dst: Layout, shape: Shape, *, itemsize: int, topology: Links | None, fits: Fits | None
) -> tuple[Step, ...] | None:
    """Steps from `src` to `dst` on a second mesh; None where `fits` accepts none of the plans found. Called by `plan`.

    Two plans are tried: the exchange sends each element to a single rank of the target mesh, which then gathers; or to
    all ranks that need the element. Between disjoint meshes the first plan is tried first: each byte crosses once.
    Between meshes that share ranks, the plan whose busiest rank receives fewer elements is tried first.

    itemsize, topology: price the steps on each mesh, as in `cheapest`.
    fits: whether a plan's steps are acceptable, as within a memory limit; None accepts all.
    """
    target = replicate_partials(dst)
    partials = tuple(
        MakePartial(axis, placement.op)
        for axis, placement in zip(dst.mesh.axis_names, dst.placements, strict=True)
        if isinstance(placement, Partial)
    )
    reduced = _scatter_partials(src, target, shape)
    sharded = _shard_replicated(target, shape)
    ways = (
        [sharded]
        if _are_disjoint(src, dst)
        else sorted((target, sharded), key=lambda way: _received(reduced, way, target, shape))
    )
    for middle in dict.fromkeys((*ways, target, sharded)):
        before = cheapest(src, reduced, shape, itemsize=itemsize, topology=topology)
        after = cheapest(middle, target, shape, itemsize=itemsize, topology=topology)
        assert before is not None and after is not None, "without `fits` there is always a way"
        communicates = any(messages_of(reduced, middle, shape, rank).receives for rank in middle.mesh.ranks)
        crossing: Step = Exchange(middle) if communicates else Relabel(middle)
        steps = (*before, crossing, *after, *partials)
        if fits is None or fits(steps):
            return steps
    return None


def _are_disjoint(src: Layout, dst: Layout) -> bool:
    return not any(rank in src.mesh for rank in dst.mesh.ranks)


def _received(reduced: Layout, middle: Layout, target: Layout, shape: Shape) -> tuple[int, int, int]:
    """Elements received in an exchange from `reduced` to `middle`, and a gather from `middle` to `target`.

    Returns the elements of the busiest rank, of all ranks, and of all ranks in the exchange alone.
    """
    ranks = middle.mesh.ranks
    exchanged = [messages_of(reduced, middle, shape, rank).received_elements for rank in ranks]
    gathered = [messages_of(middle, target, shape, rank).received_elements for rank in ranks]
    totals = [a + b for a, b in zip(exchanged, gathered, strict=True)]
    return max(totals), sum(totals), sum(exchanged)


def _scatter_partials(src: Layout, target: Layout, shape: Shape) -> Layout:
    """`src` with Shard in place of Partial, on a dim sharded by the target where possible; a scalar is replicated."""
    for axis, placement in zip(src.mesh.axis_names, src.placements, strict=True):
        if isinstance(placement, Partial):
            dim = _dim_to_cut(src, axis, shape, prefer=[*target.shard_order])
            src = src.replace(**{axis: Replicate() if dim is None else Shard(dim)})
    return src


def _shard_replicated(target: Layout, shape: Shape) -> Layout:
    """`target` with Shard in place of Replicate, so each element is on a single rank. A scalar stays replicated."""
    for axis, placement in zip(target.mesh.axis_names, target.placements, strict=True):
        if isinstance(placement, Replicate) and target.mesh.axis_size(axis) > 1:
            dim = _dim_to_cut(target, axis, shape, prefer=[])
            if dim is not None:
                target = target.replace(**{axis: Shard(dim)})
    return target


def _dim_to_cut(layout: Layout, axis: str, shape: Shape, prefer: list[int]) -> int | None:
    """The dim to shard over `axis`; None for a scalar.

    Evenly divisible dims come first, then dims in `prefer`, then larger dims.
    """
    local = layout.largest_local_shape(shape)
    dims = sorted(
        range(len(shape)),
        key=lambda dim: (local[dim] % layout.mesh.axis_size(axis) != 0, dim not in prefer, -local[dim]),
    )
    return next(iter(dims), None)
