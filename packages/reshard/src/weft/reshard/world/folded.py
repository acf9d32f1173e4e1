"""The coordinates of the named mesh (exact.py) for which a rank of a smaller mesh stands, and collectives among these.

`Fold` gives the coordinates. An op runs once for each coordinate, with the options found for the coordinate on a
`FoldedMesh` in place of the DeviceMesh. Where the op communicates over a folded axis, the runs take turns
(`run_in_turn`): each run waits in a `FoldedGroup` until all members have reached the collective.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import lru_cache, partial
from itertools import product
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from weft.mesh import Layout, LayoutError, ProcessMesh

from .exact import exact_axes, folds
from .world import Positions

Result = TypeVar("Result")
# Which of a rank's coordinates on the named mesh: for each axis of `Fold.axes`, a number below the axis's fold (named
# size over real size).
FoldIndex = tuple[int, ...]
# Which of a rank's members of a FoldedGroup: for each axis of the group, a number below the axis's fold.
MemberIndex = tuple[int, ...]


class Fold:
    """Which coordinates of the named mesh each rank of `mesh` stands for. Made by `Fold.of`.

    named: the named mesh: the axes of `mesh`, with the sizes given to `exact_sums`, and ranks counted from 0.
    axes: the folded axes, with a fold above 1, in the mesh's order.
    sizes: the folds of `axes`.
    """

    def __init__(self, mesh: ProcessMesh, all_folds: Sequence[int]) -> None:
        self.mesh = mesh
        self.named = ProcessMesh.grid(
            **{axis: size * fold for axis, size, fold in zip(mesh.axis_names, mesh.shape, all_folds, strict=True)}
        )
        self._folds = dict(zip(mesh.axis_names, all_folds, strict=True))
        self.axes = tuple(axis for axis, fold in self._folds.items() if fold > 1)
        self.sizes = tuple(self._folds[axis] for axis in self.axes)

    @classmethod
    def of(cls, mesh: ProcessMesh) -> Fold | None:
        """The Fold of `mesh` inside `exact_sums`, without folded axes where `mesh` has the named sizes; None outside.

        Raises ValueError as `folds`.
        """
        return None if exact_axes() is None else _fold(mesh, folds(mesh))

    def fold(self, axis: str) -> int:
        """The fold of an axis of `mesh`: how many named coordinates a coordinate along the axis stands for."""
        return self._folds[axis]

    def indices(self, axes: Sequence[str]) -> Iterator[FoldIndex]:
        """The indices of a rank's coordinates, row-major: all numbers on the folded axes in `axes`, 0 on the rest."""
        return product(*(range(self._folds[axis] if axis in axes else 1) for axis in self.axes))

    def rank(self, rank: int, index: FoldIndex) -> int:
        """The named mesh's rank at the coordinate `index` of `rank`, a rank of `mesh`."""
        coordinate = self.mesh.coordinate(rank)
        assert coordinate is not None, "ranks outside the mesh stand for no coordinates"
        own = dict(zip(self.axes, index, strict=True))
        return self.named.rank_at(
            **{axis: at * self._folds[axis] + own.get(axis, 0) for axis, at in coordinate.items()}
        )

    def to_named(self, layout: Layout) -> Layout:
        """The layout on the named mesh with the placements of a layout on the rank's mesh."""
        return _moved(layout, self.named)

    def from_named(self, layout: Layout) -> Layout:
        """The layout on the rank's mesh with the placements of a layout on the named mesh."""
        return _moved(layout, self.mesh)


@lru_cache(maxsize=1024)
def _fold(mesh: ProcessMesh, all_folds: tuple[int, ...]) -> Fold:
    return Fold(mesh, all_folds)


@lru_cache(maxsize=65536)
def _moved(layout: Layout, mesh: ProcessMesh) -> Layout:
    """The same placements on another mesh with the same axis names."""
    return Layout(mesh, str(layout))


class FoldedMesh:
    """Given to the kernels' `Sharding.local_options` in place of a DeviceMesh, for a single coordinate's options.

    `local_options` may pass a FoldedMesh to `group_over`; `get_group` always raises.
    mesh: the rank's DeviceMesh. index: which of the rank's coordinates, as a FoldIndex.
    communicates: whether `local_options` asked for a group along a folded axis; the op's runs must then take turns.
    """

    def __init__(self, mesh: DeviceMesh, fold: Fold, index: FoldIndex) -> None:
        self.mesh, self.fold, self.index = mesh, fold, index
        self.communicates = False

    def group(self, group: tuple[dist.ProcessGroup, Positions] | None, axes: tuple[str, ...]) -> FoldedGroup:
        """The group along `axes`, with a folded axis among them; called by `group_over`.

        group: the real group along these axes, from `group_along`; None where this rank alone stands for all members.
        """
        self.communicates = True
        return FoldedGroup(group, axes, self.fold, self.index)

    def get_group(self, axis: str) -> dist.ProcessGroup:
        """Always raises LayoutError. Called by `local_options` of ops that overlap a product with sends, step by step.

        Inside `exact_sums` these ops cannot run.
        """
        raise LayoutError(
            f"an op that communicates over {axis!r} beside its product cannot run with exact; reshard the operand, and "
            f"call the product alone"
        )


class FoldedGroup:
    """A process group of the named mesh, as a member sees the group. This rank stands for several members.

    group: the real group along the same axes, from `group_along`; None where this rank alone stands for all members.
    axes: the axes along which the members differ, in the mesh's order.
    index: which of the rank's coordinates this member is, as a FoldIndex.
    """

    def __init__(
        self, group: tuple[dist.ProcessGroup, Positions] | None, axes: tuple[str, ...], fold: Fold, index: FoldIndex
    ) -> None:
        self.group, self._fold = group, fold
        self._ranks_by_axis = tuple(fold.mesh.axis_size(axis) for axis in axes)
        self._folds_by_axis = tuple(fold.fold(axis) for axis in axes)
        own = dict(zip(fold.axes, index, strict=True))
        # Members of the same group have equal numbers on the folded axes outside of the group.
        self._key = axes, tuple(0 if axis in axes else at for axis, at in own.items())
        self._place = tuple(own.get(axis, 0) for axis in axes)
        self._members = tuple(product(*map(range, self._folds_by_axis)))

    def size(self) -> int:
        """The number of members on the named mesh."""
        return self._fold.named.axis_size(*self._key[0])

    def in_order(self, rows: Tensor) -> Tensor:
        """Sorts the members' rows into the order of the members' ranks on the named mesh.

        rows: [ranks, members of a rank, *shape]. Dim 0: the ranks of the real group, sorted by position (`Positions`).
            Dim 1: the members of each rank, sorted by MemberIndex.
        Returns [members, *shape].
        """
        axes = len(self._ranks_by_axis)
        by_axis = rows.reshape(*self._ranks_by_axis, *self._folds_by_axis, *rows.shape[2:])
        order = [dim for axis in range(axes) for dim in (axis, axes + axis)]
        return by_axis.permute(*order, *range(2 * axes, by_axis.ndim)).reshape(self.size(), *rows.shape[2:])

    def meet(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Waits until all members on this rank have called `meet`; returns `combine` of the tensors to each member.

        combine: called once, with the members' tensors in the order of their coordinates, row-major over the axes.
        """
        turns = _current.turns
        assert turns is not None, "members of a folded group run in turn"
        return turns.meet(self._key, self._place, self._members, tensor, combine)


class _ThreadTurns(threading.local):
    """What this thread does for `run_in_turn`; a thread outside of `run_in_turn` has the defaults."""

    turns: _Turns | None = None  # the threads of the running `run_in_turn`; None outside
    number = 0  # this thread's number in `turns`


_current = _ThreadTurns()


def run_in_turn(functions: Sequence[Callable[[], Result]]) -> list[Result]:
    """Calls each function on a thread of its own, and returns the results.

    A single thread runs at a time: until the function returns or waits in `FoldedGroup.meet`. The order is always the
    same. The functions see this thread's grad mode, dispatch modes and context variables, and no autocast.
    Raises the error of the first failed function.
    """
    return _Turns(len(functions)).run(functions)


@contextmanager
def _dispatching(modes: Sequence[Any]) -> Iterator[None]:
    """Context manager: this thread's ops go through the dispatch modes of the thread that called `run_in_turn`."""
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


class _Worker:
    """A thread which calls the functions of a queue in turn.

    Kept for later steps: ops on a new thread allocate memory from the system again, which takes time.
    """

    idle: ClassVar[list[_Worker]] = []

    def __init__(self) -> None:
        self.functions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._call_all, daemon=True).start()

    def _call_all(self) -> None:
        while True:
            self.functions.get()()


os.register_at_fork(after_in_child=_Worker.idle.clear)  # a forked process has no further threads


class _Turns:
    """Threads, numbered from 0, of which a single thread has the turn to run. See `run_in_turn`.

    A meeting is one call of `FoldedGroup.meet` by each member of a group. A meeting's key: the group's key, and the
    number of the group's earlier meetings.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._locks = [threading.Lock() for _ in range(count)]  # by thread: released to give the thread the turn
        self._waiting: dict[int, Any] = {}  # by thread: the meeting at which the thread waits
        self._ended: set[int] = set()
        self._meetings: dict[Any, dict[MemberIndex, Tensor]] = {}  # by meeting, then by member: the tensor given
        self._results: dict[Any, tuple[Tensor, int]] = {}  # by meeting: result, and how many members lack the result
        self._rounds: dict[Any, int] = {}  # by group's key and member: the number of the member's meetings
        self._errors: dict[int, BaseException] = {}  # by thread, in the order in which threads failed

    def run(self, functions: Sequence[Callable[[], Result]]) -> list[Result]:
        """See `run_in_turn`."""
        results: dict[int, Result] = {}
        ended: SimpleQueue[int] = SimpleQueue()  # the threads' numbers
        grad, modes = torch.is_grad_enabled(), _get_current_dispatch_mode_stack()
        num_threads = torch.get_num_threads()
        for lock in self._locks:
            lock.acquire()

        def run_one(number: int) -> None:
            _current.turns, _current.number = self, number
            self._locks[number].acquire()
            try:
                # torch has a thread count for each thread, and the bits of products depend on the thread count
                if torch.get_num_threads() != num_threads:
                    torch.set_num_threads(num_threads)
                if not self._errors:
                    with torch.set_grad_enabled(grad), _dispatching(modes):
                        results[number] = functions[number]()
            except BaseException as error:
                # The thread woken by `_pass_on` after a deadlock has an error already: the deadlock's.
                self._errors.setdefault(number, error)
            self._ended.add(number)
            self._pass_on(number)
            _current.turns = None
            ended.put(number)

        workers = [_Worker.idle.pop() if _Worker.idle else _Worker() for _ in range(self._count)]
        for number, worker in enumerate(workers):
            worker.functions.put(partial(copy_context().run, run_one, number))
        self._locks[0].release()
        for _ in workers:
            ended.get()
        _Worker.idle.extend(workers)
        if self._errors:
            raise next(iter(self._errors.values()))
        return [results[number] for number in range(self._count)]

    def meet(
        self,
        key: Any,
        place: MemberIndex,
        members: Sequence[MemberIndex],
        tensor: Tensor,
        combine: Callable[[list[Tensor]], Tensor],
    ) -> Tensor:
        """`FoldedGroup.meet` of the running thread.

        key: equal for the members of a group. place: which of this rank's members calls, as a MemberIndex. members: the
        places of all members on this rank.
        """
        number = _current.number
        meeting = key, self._rounds.setdefault((key, place), 0)
        self._rounds[key, place] += 1
        tensors = self._meetings.setdefault(meeting, {})
        tensors[place] = tensor
        if len(tensors) == len(members):
            del self._meetings[meeting]
            self._results[meeting] = combine([tensors[member] for member in members]), len(members)
        else:
            self._waiting[number] = meeting
            self._pass_on(number)
            self._locks[number].acquire()
            del self._waiting[number]
            if meeting not in self._results:
                raise RuntimeError(
                    "a coordinate of the named mesh failed before this coordinate's collective; see the error of the "
                    "failed coordinate"
                )
        result, left = self._results.pop(meeting)
        if left > 1:
            self._results[meeting] = result, left - 1
        return result

    def _pass_on(self, number: int) -> None:
        """Gives the turn of thread `number` to the next thread able to go on."""
        order = [(number + 1 + i) % self._count for i in range(self._count)]
        alive = [each for each in order if each not in self._ended]
        ready = [each for each in alive if each not in self._waiting or self._waiting[each] in self._results]
        if alive and not ready and not self._errors:
            self._errors[alive[0]] = RuntimeError(
                "the coordinates of the named mesh wait for different collectives; all must run the same collectives"
            )
        following = ready if ready and not self._errors else alive  # after an error all waits end
        if following:
            self._locks[following[0]].release()
