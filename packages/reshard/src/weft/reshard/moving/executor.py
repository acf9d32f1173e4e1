"""Runs a plan on this rank's local tensor, over torch.distributed.

Each step is a generator: it yields every collective that it starts, and returns the local tensor after the step.
`execute` waits for each collective at once; with `start_plan`, the caller computes something else between start and
wait.

Keeps the tensors that reshards receive in forward, and returns them while a recomputation repeats the forward.

Selective recomputation (weft.models' parallel/recompute.py) uses this to send nothing twice. The executor starts
every plan with communication by `run_or_replay`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout
from weft.mesh.extension import chunk

from ..planning.costs import backwards, padded_part
from ..planning.exchange import exchanging_axes, messages_of, taking_part
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
from ..world.groups import device_mesh, group_along, group_of, group_over, this_rank
from .collectives import (
    Pending,
    Phase,
    Running,
    all_gather,
    all_reduce,
    exchange,
    gather_pieces,
    pieces_of,
    reduce_scatter,
)
from .order_check import announce
from .stacking import Stacking, assembled, cut_to, padded, stacking_of

Store = Callable[[Tensor], None]  # keeps a received tensor
_thread = threading.local()  # autograd runs the backward of each device on a separate thread


def execute(plan: Plan, local: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's local tensor after the plan; `local` is not changed.

    Communication: the plan's steps, in order. A rank outside both meshes does nothing.
    """
    return start_plan(plan, local, mesh).wait()


def start_plan(plan: Plan, local: Tensor, mesh: DeviceMesh) -> Pending:
    """`execute` with its first collective started; `wait()` runs the rest.

    Inside `replay_received` nothing is sent: the result is the tensor received in forward.
    """
    if all(isinstance(step, Local) for step in plan.steps):
        return Pending(_run(plan, local, mesh))
    return run_or_replay(lambda: _run(plan, local, mesh))


def _run(plan: Plan, local: Tensor, mesh: DeviceMesh) -> Running:
    rank = this_rank()
    takes_part = rank in plan.src.mesh or rank in plan.dst.mesh
    if takes_part and any(not isinstance(step, Local) for step in plan.steps):
        announce(plan, meshes=(plan.src.mesh, plan.dst.mesh))
    if not takes_part:
        return local
    for step, layout in zip(plan.steps, plan.layouts, strict=True):
        if rank in layout.mesh or (isinstance(step, Targeted) and rank in step.target.mesh):
            on = mesh if layout.mesh == plan.src.mesh else device_mesh(layout.mesh, mesh.device_type)
            local = yield from _StepStart(layout, plan.shape, on, rank).run(step, local)
    return local


@dataclass(frozen=True, slots=True)
class _StepStart:
    """Where a step starts: the layout before the step, the global shape, the mesh and this rank."""

    layout: Layout
    shape: tuple[int, ...]
    mesh: DeviceMesh
    rank: int

    def run(self, step: Step, local: Tensor) -> Running:
        match step:
            case AllGather():
                return (yield from self._all_gather(step, local))
            case ReduceScatter():
                return (yield from self._reduce_scatter(step, local))
            case AllReduce(op=op):
                group, _ = group_along(self.mesh, axes_of(step))
                whole = local.clone(memory_format=torch.contiguous_format)
                return (yield from all_reduce(whole, op, group))
            case AllToAll() | Exchange() | Permute():
                return (yield from self._exchange(follow(step, self.layout), local))
            case ReduceExchange():
                return (yield from self._reduce_exchange(step, local))
            case Slice(axis=axis, dim=dim):
                start, stop = chunk(local.shape[dim], self.layout.mesh.axis_size(axis), self._index(axis))
                return local.narrow(dim, start, stop - start).contiguous()
            case MakePartial():
                return self._make_partial(step, local)
            case Relabel(target=target):
                return (yield from self._exchange(target, local, moves=False))

    def _index(self, axis: str) -> int:
        coordinate = self.layout.mesh.coordinate(self.rank)
        assert coordinate is not None, "ranks outside the step's mesh run only exchanges"
        return coordinate[axis]

    def _all_gather(self, step: AllGather, local: Tensor) -> Running:
        whole = follow(step, self.layout).local_shape(self.shape, self.rank)
        part = padded_part(step, self.layout, whole)
        leading = [*reversed(step.apart)] or [*axes_of(step)]  # the axis gathered last is outermost in memory
        phases, stacking = self._phases(step), self._stacking(step, part, leading)
        local = padded(local, part)
        pieces = pieces_of(local.numel(), local, phases)
        if len(pieces) == 1:
            gathered = yield from all_gather(local, phases)
        elif stacking.whole == tuple(whole) and stacking.is_of_rows:
            result = local.new_empty(whole)
            yield from gather_pieces(local.view(-1), phases, pieces, stacking.of_whole(result).flatten(len(leading)))
            return result
        else:
            gathered = local.new_empty((*stacking.sizes, local.numel()))
            yield from gather_pieces(local.view(-1), phases, pieces, gathered)
        return cut_to(assembled(gathered.view(*stacking.sizes, *part), leading, step), whole)

    def _reduce_scatter(self, step: ReduceScatter, local: Tensor) -> Running:
        part = padded_part(step, self.layout, local.shape)
        leading = [*step.apart] or [*axes_of(step)]  # the axis scattered first is outermost in memory
        stacking = self._stacking(step, part, leading)
        scattered = yield from reduce_scatter(
            stacking.of_whole(padded(local, stacking.whole)).flatten(len(leading)), step.op, self._phases(step)
        )
        mine = follow(step, self.layout).local_shape(self.shape, self.rank)
        return cut_to(scattered.view(part), mine)

    def _phases(self, step: AllGather | ReduceScatter) -> list[Phase]:
        """The groups over which the step gathers or scatters, in order, with the members' positions."""
        return [group_along(self.mesh, (axis,)) for axis in step.apart] or [group_along(self.mesh, axes_of(step))]

    def _stacking(self, step: AllGather | ReduceScatter, part: Sequence[int], leading: Sequence[str]) -> Stacking:
        return stacking_of(tuple(part), tuple(leading), tuple(map(self.layout.mesh.axis_size, leading)), step)

    def _exchange(self, target: Layout, local: Tensor, *, moves: bool = True) -> Running:
        ranks, group = self._exchanging(self.layout, target) if moves else ((), None)
        messages = messages_of(self.layout, target, self.shape, self.rank)
        held = self.layout.local_slices(self.shape, self.rank)
        wanted = target.local_slices(self.shape, self.rank)
        result = local.new_empty(target.local_shape(self.shape, self.rank))
        return (yield from exchange(local, held, result, wanted, messages, group, ranks))

    def _reduce_exchange(self, step: ReduceExchange, local: Tensor) -> Running:
        """Runs the dual exchange with sends and receives swapped, and adds the received parts."""
        ranks, group = self._exchanging(dual_layout(step.target), dual_layout(self.layout))
        messages = backwards(self.layout, step, self.shape, self.rank).reversed()
        held = self.layout.local_slices(self.shape, self.rank)
        wanted = step.target.local_slices(self.shape, self.rank)
        result = local.new_zeros(step.target.local_shape(self.shape, self.rank))
        return (yield from exchange(local, held, result, wanted, messages, group, ranks, add=True))

    def _exchanging(self, src: Layout, dst: Layout) -> tuple[tuple[int, ...], dist.ProcessGroup]:
        """The ranks, ascending, in this rank's exchange, this rank included, and the group of these ranks."""
        ranks = taking_part(src, dst, self.rank)
        axes = exchanging_axes(src, dst) if src.mesh == dst.mesh else ()
        return ranks, group_over(self.mesh, axes) if axes else group_of(ranks)

    def _make_partial(self, step: MakePartial, local: Tensor) -> Tensor:
        if step.dim is None:
            if step.op == "avg" or self._index(step.axis) == 0:
                return local
            return torch.full_like(local, identity(step.op, local.dtype))
        whole = follow(step, self.layout).local_shape(self.shape, self.rank)
        start, stop = chunk(whole[step.dim], self.layout.mesh.axis_size(step.axis), self._index(step.axis))
        result = local.new_full(whole, identity(step.op, local.dtype))
        result.narrow(step.dim, start, stop - start).copy_(local)
        return result


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


def run_or_replay(run: Callable[[], Running]) -> Pending:
    """Starts the collectives of `run`; inside `replay_received`, returns the tensor received earlier instead."""
    next_received: Callable[[], Tensor] | None = getattr(_thread, "next_received", None)
    if next_received is not None:
        return Pending.finished(next_received())
    begin: Callable[[], Store] | None = getattr(_thread, "begin", None)
    return Pending(run() if begin is None else _then_store(run(), begin()))


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
