"""A rank's coordinates on the named mesh, and collectives among the coordinates. See `exact.py`.

`Fold` gives a mesh's folds. `run_in_turn` runs a function for each coordinate in turn; where the
functions communicate over a folded axis, by a `FoldedGroup`, each function waits until all have reached the collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import lru_cache
from itertools import product
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from weft.mesh import Layout, LayoutError, ProcessMesh

from .exact import exact_axes, folds
from .world import Positions

Result = TypeVar("Result")
Index = tuple[int, ...]  # for each folded axis, which of the rank's coordinates on the named mesh


class Fold:
    """The coordinates of the named mesh that a rank of `mesh` stands for.

    named: the named mesh: the axes of `mesh`, with the named sizes, and ranks counted from 0.
    axes: the axes of `mesh` with a fold above 1, in the mesh's order.
    sizes: their folds.
    """

    def __init__(self, mesh: ProcessMesh, sizes: Sequence[int]) -> None:
        self.mesh = mesh
        self.named = ProcessMesh.grid(
            **{axis: size * fold for axis, size, fold in zip(mesh.axis_names, mesh.shape, sizes, strict=True)}
        )
        self._folds = dict(zip(mesh.axis_names, sizes, strict=True))
        self.axes = tuple(axis for axis, fold in self._folds.items() if fold > 1)
        self.sizes = tuple(self._folds[axis] for axis in self.axes)

    @classmethod
    def of(cls, mesh: ProcessMesh) -> Fold | None:
        """The fold of a mesh inside `exact_sums`; None outside."""
        return None if exact_axes() is None else _fold(mesh, folds(mesh))

    def fold(self, axis: str) -> int:
        """How many coordinates of the named mesh a coordinate of `axis` stands for."""
        return self._folds[axis]

    def indices(self, axes: Sequence[str]) -> Iterator[Index]:
        """The rank's coordinates, an index for each folded axis; 0 on folded axes outside of `axes`."""
        return product(*(range(self._folds[axis] if axis in axes else 1) for axis in self.axes))

    def rank(self, rank: int, index: Index) -> int:
        """The named mesh's rank at `index` of the coordinates of `rank`."""
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
def _fold(mesh: ProcessMesh, sizes: tuple[int, ...]) -> Fold:
    return Fold(mesh, sizes)


@lru_cache(maxsize=65536)
def _moved(layout: Layout, mesh: ProcessMesh) -> Layout:
    return Layout(mesh, str(layout))


class FoldedMesh:
    """A rank's DeviceMesh and one of its coordinates on the named mesh; accepted by `group_over`.

    communicates: whether `group_over` was asked for a group along a folded axis.
    """

    def __init__(self, mesh: DeviceMesh, fold: Fold, index: Index) -> None:
        self.mesh, self.fold, self.index = mesh, fold, index
        self.communicates = False

    def group(self, group: tuple[dist.ProcessGroup, Positions] | None, axes: tuple[str, ...]) -> FoldedGroup:
        """The group along folded `axes`. group: the ranks' group, with positions; None for a single rank."""
        self.communicates = True
        return FoldedGroup(group, axes, self.fold, self.index)

    def get_group(self, axis: str) -> dist.ProcessGroup:
        """As DeviceMesh's, for ops that exchange operands in steps. Raises LayoutError: coordinates cannot."""
        raise LayoutError(
            f"an op that communicates over {axis!r} beside its product cannot be kept to exact; reshard the operand, "
            f"and call the product alone"
        )


class FoldedGroup:
    """The members of a group on the named mesh, of which this rank stands for several.

    group: the ranks' group along the same axes, with the members' positions; None where this rank stands for all.
    axes: the group's axes, in the mesh's order. index: this member's, on all folded axes.
    """

    def __init__(
        self, group: tuple[dist.ProcessGroup, Positions] | None, axes: tuple[str, ...], fold: Fold, index: Index
    ) -> None:
        self.group, self._fold = group, fold
        self._ranks_by_axis = tuple(fold.mesh.axis_size(axis) for axis in axes)
        self._folds_by_axis = tuple(fold.fold(axis) for axis in axes)
        own = dict(zip(fold.axes, index, strict=True))
        # Members of the same group have equal indices on the axes outside of the group.
        self._key = axes, tuple(0 if axis in axes else at for axis, at in own.items())
        self._place = tuple(own.get(axis, 0) for axis in axes)
        self._members = tuple(product(*map(range, self._folds_by_axis)))

    def size(self) -> int:
        """The number of members on the named mesh."""
        return self._fold.named.axis_size(*self._key[0])

    def in_order(self, rows: Tensor) -> Tensor:
        """Rows of all members, [ranks by position, members of a rank, ...], as [members in order of the group, ...]."""
        axes = len(self._ranks_by_axis)
        by_axis = rows.reshape(*self._ranks_by_axis, *self._folds_by_axis, *rows.shape[2:])
        order = [dim for axis in range(axes) for dim in (axis, axes + axis)]
        return by_axis.permute(*order, *range(2 * axes, by_axis.ndim)).reshape(self.size(), *rows.shape[2:])

    def meet(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Wait until each member of this rank has given its tensor; return `combine` of all, computed once.

        combine: receives the tensors in the order of the members' indices, row-major over the group's axes.
        """
        turns = _current.turns
        assert turns is not None, "members of a folded group run in turn"
        return turns.meet(self._key, self._place, self._members, tensor, combine)


class _State(threading.local):
    turns: _Turns | None = None
    number = 0  # the running function's, on this thread


_current = _State()


def run_in_turn(functions: Sequence[Callable[[], Result]]) -> list[Result]:
    """The results of the functions. A function runs until its end, or until a wait in `FoldedGroup.meet`.

    The functions run on threads of their own, singly and always in the same order, in this thread's grad mode,
    dispatch modes and context variables, and without autocast. Raises the first error of a function.
    """
    return _Turns(len(functions)).run(functions)


@contextmanager
def _dispatching(modes: Sequence[Any]) -> Iterator[None]:
    """A context in which this thread dispatches to `modes`, of another thread: they count collectives, for example."""
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


class _Turns:
    """Threads that run singly: a thread passes the turn on when waiting and at the end."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._locks = [threading.Lock() for _ in range(count)]  # of each thread: a thread waits here for the turn
        self._waiting: dict[int, Any] = {}  # the meeting of each waiting thread
        self._ended: set[int] = set()
        self._meetings: dict[Any, dict[Index, Tensor]] = {}
        self._results: dict[Any, tuple[Tensor, int]] = {}  # of a meeting: the result, and the members without it
        self._rounds: dict[Any, int] = {}
        self._errors: dict[int, BaseException] = {}

    def run(self, functions: Sequence[Callable[[], Result]]) -> list[Result]:
        """See `run_in_turn`."""
        results: dict[int, Result] = {}
        grad, modes = torch.is_grad_enabled(), _get_current_dispatch_mode_stack()
        for lock in self._locks:
            lock.acquire()

        def run_one(number: int) -> None:
            _current.turns, _current.number = self, number
            self._locks[number].acquire()
            try:
                if not self._errors:
                    with torch.set_grad_enabled(grad), _dispatching(modes):
                        results[number] = functions[number]()
            except BaseException as error:
                self._errors[number] = error
            self._ended.add(number)
            self._pass_on(number)

        threads = [
            threading.Thread(target=copy_context().run, args=(run_one, number), daemon=True)
            for number in range(self._count)
        ]
        for thread in threads:
            thread.start()
        self._locks[0].release()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[min(self._errors)]
        return [results[number] for number in range(self._count)]

    def meet(
        self,
        key: Any,
        place: Index,
        members: Sequence[Index],
        tensor: Tensor,
        combine: Callable[[list[Tensor]], Tensor],
    ) -> Tensor:
        """See `FoldedGroup.meet`. key: of the group. place: of this member. members: the places of all."""
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
                raise RuntimeError("a coordinate of the named mesh failed before this one's collective; see its error")
        result, left = self._results.pop(meeting)
        if left > 1:
            self._results[meeting] = result, left - 1
        return result

    def _pass_on(self, number: int) -> None:
        """Give the turn to the next thread able to go on."""
        order = [(number + 1 + i) % self._count for i in range(self._count)]
        alive = [each for each in order if each not in self._ended]
        ready = [each for each in alive if each not in self._waiting or self._waiting[each] in self._results]
        if alive and not ready and not self._errors:
            self._errors[alive[0]] = RuntimeError(
                "the coordinates of the named mesh wait for different collectives; all must run the same ones"
            )
        following = ready if ready and not self._errors else alive  # after an error all waits end
        if following:
            self._locks[following[0]].release()
