"""Runs a plan on this rank's local tensor, over torch.distributed.

`prepare` returns the `PreparedPlan` of a plan. The first run finds the groups, shapes and messages of each step, and
later runs reuse these. A prepared step runs as a generator, which yields each started collective, and returns the local
tensor after the step. `reshard.py` starts a `PreparedPlan`. Callers with a plan and no DTensor use
`execute`, which waits for each collective before the next, or `start_plan`, to compute between start and wait.

Inside `record_received`, each plan that communicates passes its result to a callback. Inside `replay_received`, each
of these plans returns a recorded result, and sends nothing. So selective recomputation (weft.models'
parallel/recompute.py) repeats a forward without communication.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout
from weft.mesh.extension import chunk

from ..planning.costs import dual_messages, padded_part
from ..planning.exchange import Messages, exchange_axes, exchange_members, messages_of
from ..planning.layouts import dual_layout, identity, reduced_axes
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
    layout_after,
)
from ..world.exact import exact_axes
from ..world.groups import device_mesh, group_along, group_of, group_over, this_rank, world_cache
from .collectives import (
    CollectivePhase,
    Pending,
    Running,
    all_gather,
    all_reduce,
    gather_pieces,
    immediate_result,
    reduce_scatter,
    split_into_pieces,
)
from .order_check import announce
from .transfer import Stacking, Transfer, crop, exchange, pad, stacking_of
from .tree import Members, members_along

OnReceived = Callable[[Tensor], None]  # called with a received tensor, when the last collective has ended
_thread_state = threading.local()  # autograd runs the backward of each device on a separate thread


def execute(plan: Plan, local: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's local tensor after the plan; `local` is not changed. Called by the custom ops of compiled graphs.

    Communication: the plan's steps, in order. A rank outside both meshes does nothing.
    """
    return start_plan(plan, local, mesh).wait()


def start_plan(plan: Plan, local: Tensor, mesh: DeviceMesh) -> Pending:
    """Starts the first collective of a plan; `wait()` runs the remaining steps. See `PreparedPlan.start`.

    Called by gathers of sharded parameters, the sum of losses, Muon, and the custom ops of compiled graphs.
    """
    return prepare(plan, mesh).start(local)


def prepare(plan: Plan, mesh: DeviceMesh) -> PreparedPlan:
    """The plan made ready for this rank; the same value for the same plan and mesh, as long as the process groups last.

    Called by `start_plan`, and by stacked_plan.py. mesh: the DeviceMesh of the tensor before the plan.
    Communication: none.
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
        self.communicates = not all(isinstance(step, Local) for step in plan.steps)  # the same on all ranks
        self.does_nothing = not plan.steps  # whether a run returns the local tensor itself
        self._steps: list[_PreparedStep] | None = None

    def start(self, local: Tensor) -> Pending:
        """Starts the first collective on this rank's local tensor; `wait()` runs the rest.

        Called by `reshard`, and by `start_plan`. Inside `replay_received` nothing is sent: the result is the tensor
        received in forward. Communication: the plan's steps, in order; at the first run also the new groups of the
        plan's meshes. A rank outside both meshes does nothing.
        """
        return run_or_replay(self.run, local) if self.communicates else Pending(self.run(local))

    def run(self, local: Tensor) -> Running:
        """The steps as a generator of collectives; ignores `replay_received`. Called by `start` and StackedPlan."""
        if not self._takes_part:
            return local
        if self.communicates:
            announce(self._plan, meshes=(self._plan.src.mesh, self._plan.dst.mesh))
        if self._steps is None:
            self._steps = [*self._prepare_steps()]
        for step in self._steps:
            local = yield from step.run(local)
        return local

    def _prepare_steps(self) -> Iterator[_PreparedStep]:
        plan, rank, mesh = self._plan, self._rank, self._mesh
        for step, layout in zip(plan.steps, plan.layouts, strict=True):
            if rank in layout.mesh or (isinstance(step, Targeted) and rank in step.target.mesh):
                step_mesh = mesh if layout.mesh == plan.src.mesh else device_mesh(layout.mesh, mesh.device_type)
                yield _StepPreparer(layout, plan.shape, step_mesh, rank).prepare(step)


class _PreparedStep(Protocol):
    """A step with groups, shapes and messages: made once by `_StepPreparer`, run in each call."""

    def run(self, local: Tensor) -> Running: ...


@dataclass(frozen=True, slots=True)
class _PreparedAllGather:
    """An all-gather. A part is a member's shard; a piece is a range of a part's elements, sent by itself."""

    phases: list[CollectivePhase]  # the groups to gather over, in order, with the members' positions
    stacking: Stacking  # how the collectives return the parts
    result_shape: tuple[int, ...]  # shape of the result, without padding

    def run(self, local: Tensor) -> Running:
        stacking = self.stacking
        local = pad(local, stacking.part)
        pieces = split_into_pieces(local.numel(), local, self.phases)
        if len(pieces) == 1:
            gathered = yield from all_gather(local, self.phases)
        elif stacking.padded_shape == self.result_shape and stacking.parts_are_rows:
            # Without padding, and with rows as parts, the stacked parts are the result's memory in order. So the pieces
            # are received into a view of the result, [*sizes, elements of a part], and nothing is copied afterwards.
            result = local.new_empty(self.result_shape)
            rows = stacking.as_stacked(result).flatten(len(stacking.sizes))
            yield from gather_pieces(local.view(-1), self.phases, pieces, rows)
            return result
        else:
            gathered = local.new_empty((*stacking.sizes, local.numel()))
            yield from gather_pieces(local.view(-1), self.phases, pieces, gathered)
        return crop(stacking.unstack(gathered), self.result_shape)


@dataclass(frozen=True, slots=True)
class _PreparedReduceScatter:
    phases: list[CollectivePhase]  # the groups to scatter over, in order, with the members' positions
    addends: list[Members]  # for each phase, the members' places in the tree of `exact_sums`
    stacking: Stacking  # how the collectives take the parts
    op: str
    result_shape: tuple[int, ...]  # shape of this rank's part, without padding

    def run(self, local: Tensor) -> Running:
        stacking = self.stacking
        # The stacked tensor has no name here: a local variable would keep its memory until the last phase ends.
        scattered = yield from reduce_scatter(
            stacking.as_stacked(pad(local, stacking.padded_shape)).flatten(len(stacking.sizes)),
            self.op,
            self.phases,
            self.addends,
        )
        return crop(scattered.view(stacking.part), self.result_shape)


@dataclass(frozen=True, slots=True)
class _PreparedAllReduce:
    group: dist.ProcessGroup
    members: Members
    op: str

    def run(self, local: Tensor) -> Running:
        return all_reduce(local.clone(memory_format=torch.contiguous_format), self.op, self.group, self.members)


@dataclass(frozen=True, slots=True)
class _PreparedExchange:
    transfer: Transfer
    shape: tuple[int, ...]  # of the result
    group: dist.ProcessGroup | None  # None where every rank has what it needs
    # Whether received parts are added to zeros instead of copied: several ranks may send the same element.
    add: bool = False
    # For `add` inside `exact_sums`: the exchange into rows, one for each addend, and the order in which rows are added.
    in_tree: tuple[Transfer, Members] | None = None

    def run(self, local: Tensor) -> Running:
        if self.in_tree is not None and exact_axes() is not None:
            transfer, members = self.in_tree
            rows = local.new_empty((len(members.positions), *self.shape))
            yield from exchange(local, rows, transfer, self.group)
            return members.reduce("sum", rows)
        result = local.new_zeros(self.shape) if self.add else local.new_empty(self.shape)
        return (yield from exchange(local, result, self.transfer, self.group, add=self.add))


@dataclass(frozen=True, slots=True)
class _PreparedSlice:
    dim: int
    start: int
    length: int

    def run(self, local: Tensor) -> Running:
        return immediate_result(local.narrow(self.dim, self.start, self.length).contiguous())


@dataclass(frozen=True, slots=True)
class _PreparedMakePartial:
    """From a shard: this rank's values in their region of the result, and `op`'s identity (as 0 for sums) elsewhere.

    From a replica (`region` is None): the whole replica if `holds_value`, else the identity everywhere.
    """

    op: str
    region: tuple[int, int, int] | None  # dim, start, length
    result_shape: tuple[int, ...]
    holds_value: bool = True  # whether this rank keeps its replica

    def run(self, local: Tensor) -> Running:
        if self.region is None:
            return immediate_result(
                local if self.holds_value else torch.full_like(local, identity(self.op, local.dtype))
            )
        result = local.new_full(self.result_shape, identity(self.op, local.dtype))
        result.narrow(*self.region).copy_(local)
        return immediate_result(result)


@dataclass(frozen=True, slots=True)
class _StepPreparer:
    """Prepares a step for this rank: finds groups, shapes and messages."""

    layout: Layout  # before the step
    shape: tuple[int, ...]  # of the global tensor
    mesh: DeviceMesh  # of `layout`
    rank: int

    def prepare(self, step: Step) -> _PreparedStep:
        """The step, ready to run. Called at the first run of a PreparedPlan. Communication: new groups are made."""
        match step:
            case AllGather():
                result_shape = self._shape_after(step)
                part = padded_part(step, self.layout, result_shape)
                # With a collective for each axis (`apart`), the axis gathered last is outermost in memory.
                leading = step.apart[::-1] or axes_of(step)
                return _PreparedAllGather(self._phases(step), self._stacking(step, part, leading), result_shape)
            case ReduceScatter():
                part = padded_part(step, self.layout, self.layout.local_shape(self.shape, self.rank))
                leading = step.apart or axes_of(step)  # with `apart`, the axis scattered first is outermost in memory
                stacking = self._stacking(step, part, leading)
                phases, addends = self._phases(step), self._addends(step)
                return _PreparedReduceScatter(phases, addends, stacking, step.op, self._shape_after(step))
            case AllReduce(op=op):
                group, positions = group_along(self.mesh, axes_of(step))
                return _PreparedAllReduce(group, members_along(self.layout.mesh, axes_of(step), positions), op)
            case AllToAll() | Exchange() | Permute():
                target = layout_after(step, self.layout)
                return self._prepare_exchange(target, *self._members_and_group(self.layout, target))
            case ReduceExchange():
                return self._prepare_reduce_exchange(step)
            case Slice(axis=axis, dim=dim):
                size = self.layout.local_shape(self.shape, self.rank)[dim]
                start, stop = chunk(size, self.layout.mesh.axis_size(axis), self._index(axis))
                return _PreparedSlice(dim, start, stop - start)
            case MakePartial():
                return self._prepare_make_partial(step)
            case Relabel(target=target):
                return self._prepare_exchange(target, (), None)

    def _shape_after(self, step: Step) -> tuple[int, ...]:
        return layout_after(step, self.layout).local_shape(self.shape, self.rank)

    def _index(self, axis: str) -> int:
        coordinate = self.layout.mesh.coordinate(self.rank)
        assert coordinate is not None, "ranks outside the step's mesh run only exchanges"
        return coordinate[axis]

    def _phases(self, step: AllGather | ReduceScatter) -> list[CollectivePhase]:
        return [group_along(self.mesh, (axis,)) for axis in step.apart] or [group_along(self.mesh, axes_of(step))]

    def _addends(self, step: ReduceScatter) -> list[Members]:
        axes_of_phases: list[tuple[str, ...]] = [(axis,) for axis in step.apart] or [axes_of(step)]
        return [members_along(self.layout.mesh, axes, group_along(self.mesh, axes)[1]) for axes in axes_of_phases]

    def _stacking(self, step: AllGather | ReduceScatter, part: Sequence[int], leading: Sequence[str]) -> Stacking:
        return stacking_of(tuple(part), tuple(leading), tuple(map(self.layout.mesh.axis_size, leading)), step)

    def _prepare_exchange(
        self, target: Layout, ranks: tuple[int, ...], group: dist.ProcessGroup | None, dual: Messages | None = None
    ) -> _PreparedExchange:
        """The exchange for `target` on this rank, with the given members and group.

        dual: for a reduce-exchange, the messages of its dual exchange, which go in the opposite direction and are
            added. None for a plain exchange.
        """
        messages = messages_of(self.layout, target, self.shape, self.rank) if dual is None else dual.reversed()
        held, needed = (layout.local_slices(self.shape, self.rank) for layout in (self.layout, target))
        shape = target.local_shape(self.shape, self.rank)
        return _PreparedExchange(Transfer.of(held, needed, messages, ranks), shape, group, add=dual is not None)

    def _prepare_reduce_exchange(self, step: ReduceExchange) -> _PreparedExchange:
        ranks, group = self._members_and_group(dual_layout(step.target), dual_layout(self.layout))
        dual = dual_messages(self.layout, step, self.shape, self.rank)
        prepared = self._prepare_exchange(step.target, ranks, group, dual)
        mesh, axes = self.layout.mesh, reduced_axes(self.layout, step.target)
        if mesh != step.target.mesh or not axes:
            return prepared
        # For each set of coordinates along the reduced axes, the ranks there send each element once.
        position = {rank: i for group in mesh.groups(*axes) for i, rank in enumerate(group)}
        members = members_along(mesh, axes, range(mesh.axis_size(*axes)))
        senders = [position[sender] for sender, _ in dual.reversed().receives]
        in_tree = prepared.transfer.into_rows(senders, position[self.rank]), members
        return replace(prepared, in_tree=in_tree)

    def _members_and_group(self, src: Layout, dst: Layout) -> tuple[tuple[int, ...], dist.ProcessGroup]:
        """The members of this rank's exchange, ascending, and their process group."""
        ranks = exchange_members(src, dst, self.rank)
        axes = exchange_axes(src, dst) if src.mesh == dst.mesh else ()
        return ranks, group_over(self.mesh, axes) if axes else group_of(ranks)

    def _prepare_make_partial(self, step: MakePartial) -> _PreparedMakePartial:
        index, result_shape = self._index(step.axis), self._shape_after(step)
        if step.dim is None:
            return _PreparedMakePartial(step.op, None, result_shape, holds_value=step.op == "avg" or index == 0)
        start, stop = chunk(result_shape[step.dim], self.layout.mesh.axis_size(step.axis), index)
        return _PreparedMakePartial(step.op, (step.dim, start, stop - start), result_shape)


@contextmanager
def record_received(make_callback: Callable[[], OnReceived]) -> Iterator[None]:
    """Context manager: in the block, reshards and transports (`run_or_replay`) pass received tensors to callbacks.

    Entered by weft.models' parallel/recompute.py around a forward. Holds for the calling thread alone.

    make_callback: called when a reshard or transport starts; returns the callback for the tensor to be received.
    """
    with _set_in_block("make_callback", make_callback):
        yield


@contextmanager
def replay_received(next_received: Callable[[], Tensor]) -> Iterator[None]:
    """Context manager: in the block, each `run_or_replay` sends nothing, and gives `next_received()` as the result.

    Entered by parallel/recompute.py around the repeated forward, in backward. Holds for the calling thread alone.
    """
    with _set_in_block("next_received", next_received):
        yield


def run_or_replay(run: Callable[[Tensor], Running], local: Tensor) -> Pending:
    """Starts the collectives of `run(local)`; inside `replay_received`, returns the tensor received earlier instead.

    Called by `start` of a plan with communication, and by weft.models to transport experts' tokens and packed keys.
    """
    next_received: Callable[[], Tensor] | None = getattr(_thread_state, "next_received", None)
    if next_received is not None:
        return Pending.finished(next_received())
    make_callback: Callable[[], OnReceived] | None = getattr(_thread_state, "make_callback", None)
    return Pending(run(local) if make_callback is None else _then_call(run(local), make_callback()))


def _then_call(running: Running, on_received: OnReceived) -> Running:
    result = yield from running
    on_received(result)
    return result


@contextmanager
def _set_in_block(name: str, value: object) -> Iterator[None]:
    before = getattr(_thread_state, name, None)
    setattr(_thread_state, name, value)
    try:
        yield
    finally:
        setattr(_thread_state, name, before)
