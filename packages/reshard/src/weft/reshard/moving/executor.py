"""Runs a plan on this rank's local tensor, over torch.distributed.

`prepared` returns the plan's `PreparedPlan`. Its first run works out all that does not depend on the tensor's values,
and later runs reuse this. Each prepared step runs as a generator: it yields every collective that it starts, and
returns the local tensor after the step. `execute` waits for each collective at once; with `start_plan`, the caller
computes something else between start and wait.

Inside `record_received`, each plan that communicates passes its result to a callback. Inside `replay_received`, it
returns the next kept result and sends nothing. So selective recomputation (weft.models' parallel/recompute.py) repeats
a forward without communication.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout
from weft.mesh.extension import chunk

from ..planning.costs import backwards, padded_part
from ..planning.exchange import Messages, exchanging_axes, messages_of, taking_part
from ..planning.layouts import dual_layout, identity
from ..planning.plan import Plan
from ..planning.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Local,
    MakePartial,
    Permute,
    ReduceExchange,
    ReduceScatter,
    Relabel,
    Slice,
    Step,
    Targeted,
    axes_of,
    follow,
)
from ..world.groups import device_mesh, group_along, group_of, group_over, this_rank, world_cache
from .collectives import (
    Pending,
    Phase,
    Running,
    Transfer,
    all_gather,
    all_reduce,
    exchange,
    finished,
    gather_pieces,
    pieces_of,
    reduce_scatter,
)
from .order_check import announce
from .stacking import Stacking, cut_to, padded, stacking_of

Store = Callable[[Tensor], None]  # keeps a received tensor
_thread = threading.local()  # autograd runs the backward of each device on a separate thread


def execute(plan: Plan, local: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's local tensor after the plan; `local` is not changed.

    Communication: the plan's steps, in order. A rank outside both meshes does nothing.
    """
    return start_plan(plan, local, mesh).wait()


def start_plan(plan: Plan, local: Tensor, mesh: DeviceMesh) -> Pending:
    """`execute` with its first collective started; `wait()` runs the rest. See `PreparedPlan.start`."""
    return prepared(plan, mesh).start(local)


def prepared(plan: Plan, mesh: DeviceMesh) -> PreparedPlan:
    """The plan made ready for this rank; the same value for the same plan and mesh, as long as the process groups last.

    mesh: of the tensor before the plan. Communication: none.
    """
    cache, key = world_cache(), (PreparedPlan, plan, mesh)
    found: PreparedPlan | None = cache.get(key)
    if found is None:
        found = cache[key] = PreparedPlan(plan, mesh)
    return found


class PreparedPlan:
    """A plan ready to run on this rank. The first run finds groups, shapes and messages, and later runs reuse them."""

    def __init__(self, plan: Plan, mesh: DeviceMesh) -> None:
        self._plan, self._mesh, self._rank = plan, mesh, this_rank()
        self._takes_part = self._rank in plan.src.mesh or self._rank in plan.dst.mesh
        self._communicates = not all(isinstance(step, Local) for step in plan.steps)
        self._steps: list[_Prepared] | None = None

    def start(self, local: Tensor) -> Pending:
        """Starts the first collective on this rank's local tensor; `wait()` runs the rest.

        Inside `replay_received` nothing is sent: the result is the tensor received in forward.
        Communication: the plan's steps, in order; at the first run also the new groups of the plan's meshes. A rank
        outside both meshes does nothing.
        """
        return run_or_replay(self._run, local) if self._communicates else Pending(self._run(local))

    def _run(self, local: Tensor) -> Running:
        if not self._takes_part:
            return local
        if self._communicates:
            announce(self._plan, meshes=(self._plan.src.mesh, self._plan.dst.mesh))
        if self._steps is None:
            self._steps = [*self._prepared_steps()]
        for step in self._steps:
            local = yield from step.run(local)
        return local

    def _prepared_steps(self) -> Iterator[_Prepared]:
        plan, rank, mesh = self._plan, self._rank, self._mesh
        for step, layout in zip(plan.steps, plan.layouts, strict=True):
            if rank in layout.mesh or (isinstance(step, Targeted) and rank in step.target.mesh):
                on = mesh if layout.mesh == plan.src.mesh else device_mesh(layout.mesh, mesh.device_type)
                yield _StepStart(layout, plan.shape, on, rank).prepared(step)


class _Prepared(Protocol):
    """A step with all that does not depend on the tensor's values: what runs in every call."""

    def run(self, local: Tensor) -> Running: ...


@dataclass(frozen=True, slots=True)
class _AllGather:
    phases: list[Phase]  # the groups to gather over, in order, with the members' positions
    stacking: Stacking
    whole: tuple[int, ...]  # shape of the result

    def run(self, local: Tensor) -> Running:
        stacking = self.stacking
        local = padded(local, stacking.part)
        pieces = pieces_of(local.numel(), local, self.phases)
        if len(pieces) == 1:
            gathered = yield from all_gather(local, self.phases)
        elif stacking.whole == self.whole and stacking.is_of_rows:
            result = local.new_empty(self.whole)
            rows = stacking.of_whole(result).flatten(len(stacking.sizes))
            yield from gather_pieces(local.view(-1), self.phases, pieces, rows)
            return result
        else:
            gathered = local.new_empty((*stacking.sizes, local.numel()))
            yield from gather_pieces(local.view(-1), self.phases, pieces, gathered)
        return cut_to(stacking.side_by_side(gathered), self.whole)


@dataclass(frozen=True, slots=True)
class _ReduceScatter:
    phases: list[Phase]  # the groups to scatter over, in order, with the members' positions
    stacking: Stacking
    op: str
    mine: tuple[int, ...]  # shape of this rank's part

    def run(self, local: Tensor) -> Running:
        stacking = self.stacking
        # Passed without a name: a local variable would keep the stacked tensor alive through the last phase.
        scattered = yield from reduce_scatter(
            stacking.of_whole(padded(local, stacking.whole)).flatten(len(stacking.sizes)), self.op, self.phases
        )
        return cut_to(scattered.view(stacking.part), self.mine)


@dataclass(frozen=True, slots=True)
class _AllReduce:
    group: dist.ProcessGroup
    op: str

    def run(self, local: Tensor) -> Running:
        return all_reduce(local.clone(memory_format=torch.contiguous_format), self.op, self.group)


@dataclass(frozen=True, slots=True)
class _Exchange:
    transfer: Transfer
    shape: tuple[int, ...]  # of the result
    group: dist.ProcessGroup | None  # None where every rank has what it needs
    # Whether received parts are added to zeros instead of copied: several ranks may send the same element.
    add: bool = False

    def run(self, local: Tensor) -> Running:
        result = local.new_zeros(self.shape) if self.add else local.new_empty(self.shape)
        return exchange(local, result, self.transfer, self.group, add=self.add)


@dataclass(frozen=True, slots=True)
class _Slice:
    dim: int
    start: int
    length: int

    def run(self, local: Tensor) -> Running:
        return finished(local.narrow(self.dim, self.start, self.length).contiguous())


@dataclass(frozen=True, slots=True)
class _MakePartial:
    """This rank's values in their place, `op`'s identity elsewhere.

    With `place` None: all values (`holds_value`) or all identity.
    """

    op: str
    place: tuple[int, int, int] | None  # dim, start, length
    whole: tuple[int, ...]  # shape of the result
    holds_value: bool = True  # whether this rank holds the value, where place is None

    def run(self, local: Tensor) -> Running:
        if self.place is None:
            return finished(local if self.holds_value else torch.full_like(local, identity(self.op, local.dtype)))
        result = local.new_full(self.whole, identity(self.op, local.dtype))
        result.narrow(*self.place).copy_(local)
        return finished(result)


@dataclass(frozen=True, slots=True)
class _StepStart:
    """Where a step starts: the layout before the step, the global shape, the mesh and this rank."""

    layout: Layout
    shape: tuple[int, ...]
    mesh: DeviceMesh
    rank: int

    def prepared(self, step: Step) -> _Prepared:
        match step:
            case AllGather():
                whole = self._shape_after(step)
                part = padded_part(step, self.layout, whole)
                leading = step.apart[::-1] or axes_of(step)  # the axis gathered last is outermost in memory
                return _AllGather(self._phases(step), self._stacking(step, part, leading), whole)
            case ReduceScatter():
                part = padded_part(step, self.layout, self.layout.local_shape(self.shape, self.rank))
                leading = step.apart or axes_of(step)  # the axis scattered first is outermost in memory
                stacking = self._stacking(step, part, leading)
                return _ReduceScatter(self._phases(step), stacking, step.op, self._shape_after(step))
            case AllReduce(op=op):
                return _AllReduce(group_along(self.mesh, axes_of(step))[0], op)
            case AllToAll() | Exchange() | Permute():
                target = follow(step, self.layout)
                return self._exchange(target, *self._exchanging(self.layout, target))
            case ReduceExchange():
                return self._reduce_exchange(step)
            case Slice(axis=axis, dim=dim):
                size = self.layout.local_shape(self.shape, self.rank)[dim]
                start, stop = chunk(size, self.layout.mesh.axis_size(axis), self._index(axis))
                return _Slice(dim, start, stop - start)
            case MakePartial():
                return self._make_partial(step)
            case Relabel(target=target):
                return self._exchange(target, (), None)

    def _shape_after(self, step: Step) -> tuple[int, ...]:
        return follow(step, self.layout).local_shape(self.shape, self.rank)

    def _index(self, axis: str) -> int:
        coordinate = self.layout.mesh.coordinate(self.rank)
        assert coordinate is not None, "ranks outside the step's mesh run only exchanges"
        return coordinate[axis]

    def _phases(self, step: AllGather | ReduceScatter) -> list[Phase]:
        return [group_along(self.mesh, (axis,)) for axis in step.apart] or [group_along(self.mesh, axes_of(step))]

    def _stacking(self, step: AllGather | ReduceScatter, part: Sequence[int], leading: Sequence[str]) -> Stacking:
        return stacking_of(tuple(part), tuple(leading), tuple(map(self.layout.mesh.axis_size, leading)), step)

    def _exchange(
        self, target: Layout, ranks: tuple[int, ...], group: dist.ProcessGroup | None, back: Messages | None = None
    ) -> _Exchange:
        """back: for a reduce-exchange, the messages of the dual exchange: sent in the opposite direction, and added.

        None for a plain exchange.
        """
        messages = messages_of(self.layout, target, self.shape, self.rank) if back is None else back.reversed()
        held, wanted = (layout.local_slices(self.shape, self.rank) for layout in (self.layout, target))
        shape = target.local_shape(self.shape, self.rank)
        return _Exchange(Transfer.of(held, wanted, messages, ranks), shape, group, add=back is not None)

    def _reduce_exchange(self, step: ReduceExchange) -> _Exchange:
        ranks, group = self._exchanging(dual_layout(step.target), dual_layout(self.layout))
        return self._exchange(step.target, ranks, group, backwards(self.layout, step, self.shape, self.rank))

    def _exchanging(self, src: Layout, dst: Layout) -> tuple[tuple[int, ...], dist.ProcessGroup]:
        """The ranks, ascending, in this rank's exchange, this rank included, and the group of these ranks."""
        ranks = taking_part(src, dst, self.rank)
        axes = exchanging_axes(src, dst) if src.mesh == dst.mesh else ()
        return ranks, group_over(self.mesh, axes) if axes else group_of(ranks)

    def _make_partial(self, step: MakePartial) -> _MakePartial:
        index, whole = self._index(step.axis), self._shape_after(step)
        if step.dim is None:
            return _MakePartial(step.op, None, whole, holds_value=step.op == "avg" or index == 0)
        start, stop = chunk(whole[step.dim], self.layout.mesh.axis_size(step.axis), index)
        return _MakePartial(step.op, (step.dim, start, stop - start), whole)


@contextmanager
def record_received(begin: Callable[[], Store]) -> Iterator[None]:
    """Inside, every reshard with communication passes the tensor that it receives to a callback.

    begin: called when a reshard starts; returns a function, which is called with the received tensor.
    """
    with _set("begin", begin):
        yield


@contextmanager
def replay_received(next_received: Callable[[], Tensor]) -> Iterator[None]:
    """Inside, a reshard that would communicate returns `next_received()` instead, and sends nothing."""
    with _set("next_received", next_received):
        yield


def run_or_replay(run: Callable[[Tensor], Running], local: Tensor) -> Pending:
    """Starts the collectives of `run(local)`; inside `replay_received`, returns the tensor received earlier instead."""
    next_received: Callable[[], Tensor] | None = getattr(_thread, "next_received", None)
    if next_received is not None:
        return Pending.finished(next_received())
    begin: Callable[[], Store] | None = getattr(_thread, "begin", None)
    return Pending(run(local) if begin is None else _then_store(run(local), begin()))


def _then_store(running: Running, store: Store) -> Running:
    result = yield from running
    store(result)
    return result


@contextmanager
def _set(name: str, value: object) -> Iterator[None]:
    before = getattr(_thread, name, None)
    setattr(_thread, name, value)
    try:
        yield
    finally:
        setattr(_thread, name, before)
