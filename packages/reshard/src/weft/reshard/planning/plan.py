"""A plan: the steps from one layout to another, as a value that can be priced, printed, simulated and transposed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from weft.mesh import Layout, LayoutError
from weft.mesh.picture import coloured, draw

from .across import cheapest_across
from .bounds import lower_bound_elements
from .costs import peak_elements, received_elements, seconds_of
from .layouts import check_reductions, dual_layout, without_trivial_axes
from .links import Links
from .pictures import WIDTH, pictured, written
from .search import cheapest
from .steps import Step, dual, follow

LISTED = 16  # ranks whose bytes are listed one by one, where they differ


@dataclass(frozen=True)
class Plan:
    """How a tensor of `shape` and `dtype` goes from `src` to `dst`; the same on every rank."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: tuple[Step, ...]
    topology: Links | None = None

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout before each step."""
        layouts = [without_trivial_axes(self.src)]
        for step in self.steps:
            layouts.append(follow(step, layouts[-1]))
        return tuple(layouts[:-1])

    def __str__(self) -> str:
        way = ", ".join(written(step, layout) for step, layout in zip(self.steps, self.layouts, strict=True))
        return f"({self.src}) -> ({self.dst}) of {self.dtype} {self.shape}: {way or 'nothing to do'}"

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both meshes, ascending."""
        return tuple(sorted({*self.src.mesh.ranks, *self.dst.mesh.ranks}))

    def received_bytes(self, rank: int) -> int:
        """Bytes that arrive at `rank` from other ranks; the algorithms counted are stated in `costs.py`."""
        return self.dtype.itemsize * sum(self._each(received_elements, rank))

    @cached_property
    def max_received_bytes(self) -> int:
        """Bytes that arrive at the rank that receives most. Cost: all ranks are asked."""
        return max(self.received_bytes(rank) for rank in self.ranks)

    @cached_property
    def lower_bound_bytes(self) -> int:
        """Bytes that some rank must receive whatever the plan; see `bounds.py`."""
        return self.dtype.itemsize * lower_bound_elements(
            without_trivial_axes(self.src), without_trivial_axes(self.dst), self.shape
        )

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes alive at once on the rank that needs most: the source, a step's input, its result and its buffers.

        The source is alive all the time, as the caller holds it; it is taken to be contiguous.
        """
        return self.dtype.itemsize * max(self._peak_bytes_of(rank) for rank in self.ranks)

    def _peak_bytes_of(self, rank: int) -> int:
        source = math.prod(self.src.local_shape(self.shape, rank))
        peaks = self._each(peak_elements, rank)
        return max([source, *peaks[:1], *(source + peak for peak in peaks[1:])])

    @property
    def seconds(self) -> float:
        """Predicted time of the transfers, by the topology that the plan was made for.

        Raises ValueError for a plan made without one.
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
        """The plan of the gradients: from that of the result to that of the source, each step its dual, in reverse.

        The gradient of a replicated value is Partial("sum") and that of a sum is replicated; transposing twice gives the
        plan back. Raises LayoutError for reductions that are not sums.
        """
        steps = (dual(step, layout) for step, layout in zip(self.steps, self.layouts, strict=True))
        src, dst = dual_layout(self.dst), dual_layout(self.src)
        return Plan(src, dst, self.shape, self.dtype, tuple(steps)[::-1], self.topology)

    def explain(self, *, width: int = WIDTH) -> str:
        """The steps, each with a picture of who holds what, bytes against the bound, peak memory, predicted seconds.

        width: columns that the pictures should not exceed; where they do not fit side by side, they stand one below the
            other.
        """
        lines = [*self._figures(), *pictured(self.steps, self.layouts, self.shape, self.dtype.itemsize, width)]
        if not self.steps:
            lines += ["nothing to do", *draw(self.src, self.shape, width=width)]
        return "\n".join(lines)

    def _figures(self) -> list[str]:
        received, bound = self.max_received_bytes, self.lower_bound_bytes
        gap = "as few as any plan" if received == bound else f"at least {bound:,} by the bound"
        if bound and received != bound:
            gap += f", {received / bound:.2f} times that"
        there = f" -> {self.dst.mesh}" if self.src.mesh != self.dst.mesh else ""
        return [
            f"({self.src}) -> ({self.dst})",
            f"{self.dtype} {self.shape} on {self.src.mesh}{there}",
            f"received by the busiest rank: {received:,} bytes, {gap}",
            *self._received_by_each(),
            f"alive at once on a rank: {self.peak_bytes:,} bytes at most",
            *([] if self.topology is None else [f"predicted time: {1e6 * self.seconds:,.1f} us"]),
        ]

    def _received_by_each(self) -> list[str]:
        """What each of a few ranks receives, where that differs."""
        received = {rank: self.received_bytes(rank) for rank in self.ranks[:LISTED]}
        if len(self.ranks) > LISTED or len(set(received.values())) == 1:
            return []
        listed = ", ".join(f"rank {rank} {count:,}" for rank, count in received.items())
        return [f"received by each: {listed} bytes"]

    def __rich__(self) -> Any:
        """What `rich.print(plan)` shows: `explain` in colour, where the terminal has it."""
        return coloured(self.explain())

    def _each(self, cost: Callable[[Step, Layout, Sequence[int], int], int], rank: int) -> list[int]:
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
    """The plan from `src` to `dst` for a global tensor; computed from global metadata alone, cached by value.

    topology: links of the axes; without it the plan has the fewest bytes received by the busiest rank, with it the
        fewest seconds.
    memory_limit: bytes that may be alive at once on a rank: source, a step's input, its result and buffers together.
    Raises LayoutError where the layouts shard a dim that the shape does not have, name reductions that do not go
    together or that the dtype does not have, or where every plan found exceeds the memory limit.
    """
    return _plan(src, dst, tuple(shape), dtype, topology, memory_limit)


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
    if src.mesh != dst.mesh and _same_but_for_the_order_of_axes(src, dst):
        dst = Layout(src.mesh, str(dst))
    peaks: list[int] = []

    def made(steps: tuple[Step, ...]) -> Plan:
        return Plan(src, dst, shape, dtype, steps, topology)

    def fits(steps: tuple[Step, ...]) -> bool:
        peaks.append(made(steps).peak_bytes)
        return memory_limit is None or peaks[-1] <= memory_limit

    start, end = without_trivial_axes(src), without_trivial_axes(dst)
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
            f"no plan from ({src}) to ({dst}) for {dtype} {shape} stays within memory_limit={memory_limit} bytes a rank; "
            f"the leanest found needs {min(peaks)}"
        )
    return made(steps)


def _same_but_for_the_order_of_axes(src: Layout, dst: Layout) -> bool:
    names = src.mesh.axis_names
    return set(dst.mesh.axis_names) == set(names) and dst.mesh.permute(*names) == src.mesh
