"""Parameters that lie on shards and are whole while their module computes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary
from weft.mesh import Layout

from .dtensor import layout_of, memory_of, wrap
from .groups import this_rank
from .weakly import weakly


def in_backward() -> bool:
    """Whether autograd's backward runs in this thread. torch.utils.checkpoint asks in the same way."""
    return torch._C._current_graph_task_id() != -1


class Gathering(Protocol):
    """What gathers some parameters together: see `Unit`, in units.py."""

    goes_backward: bool

    def start(self) -> None: ...

    def rest(self) -> None: ...

    def accumulated(self, whole: Whole) -> None: ...

    def end_pass(self) -> None: ...


def stretch_in(shard: Layout, whole: Layout, shape: Sequence[int], rank: int) -> tuple[slice, ...] | None:
    """Where a rank's part of a shard lies in its part of the whole; None where that is not one stretch of contiguous memory."""
    held, outer = shard.local_slices(shape, rank), whole.local_slices(shape, rank)
    found = tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(held, outer, strict=True))
    sizes = [b.stop - b.start for b in outer]
    cut = next((i for i, (a, size) in enumerate(zip(found, sizes, strict=True)) if a != slice(0, size)), len(found))
    return found if all(size == 1 for size in sizes[:cut]) else None


class Whole:
    """The full-size copy of a sharded parameter that its module computes with: an autograd leaf over a buffer that is freed and refilled.

    Tensors saved for backward share the buffer. stays: keep the buffer between calls (ZeRO 1, 2). sums: let the gradient accumulate
    (ZeRO 1). While the buffer is kept, a contiguous shard is a view into the buffer: the parameter is held once. A shard that the program
    has views of keeps its own memory, so that the views stay valid.
    filled: the shard's state when the buffer was filled; None without a buffer. time: `Wholes.time` when the buffer was filled.
    """

    def __init__(self, shard: DTensor, layout: Layout, *, stays: bool, sums: bool) -> None:
        part = layout.local_shape(shard.shape, this_rank())
        with torch.inference_mode(False):  # a tensor that is born in it could not be trained with after
            made = torch.empty(part, dtype=shard.dtype, device=memory_of(shard).device)
            self.leaf = nn.Parameter(wrap(made, layout, shard.shape), requires_grad=False)
            assert isinstance(self.leaf, DTensor), "a parameter made of a DTensor is one"
            self._shard, self._local = memory_of(shard), memory_of(self.leaf)
            self.memory = (
                self._local.data
            )  # what is filled: by .data, as autograd is told of no change where there is none
        self._stretch = stretch_in(layout_of(shard), layout, shard.shape, this_rank())
        self._lent: Tensor | None = None  # this rank's part of the shard, where it is a stretch of the memory
        self._storage = self._local.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._storage.resize_(0)
        self.layout, self.stays, self.sums = layout, stays, sums
        self.users = 0
        self.filled: object = None
        self.time = 0
        self._last: object = None  # that it was last filled with
        self.steps = 0  # of optimizers, some of which change a tensor and not its version
        self.units: weakref.WeakSet[Gathering] = weakref.WeakSet()
        self.synchronized_by: object = None  # a weak reference to the GradientSync that brings gradients to the shard
        self._hooked = False

    def follow(self, shard: DTensor) -> None:
        """Requires a gradient where the shard does; the shard's gradient hooks are called with the whole's gradient."""
        requires_grad = shard.requires_grad
        if self.leaf.requires_grad != requires_grad:
            self.leaf.requires_grad_(requires_grad)
        if requires_grad and not self._hooked:
            told, of, self._hooked = weakref.ref(self), weakref.ref(shard), True
            self.leaf.register_hook(lambda grad: _hooked(of(), grad))  # type: ignore[no-untyped-call]
            self.leaf.register_post_accumulate_grad_hook(lambda _: _accumulated(told(), of()))  # type: ignore[no-untyped-call]

    def state_of(self, shard: DTensor) -> object:
        """A value that differs after an optimizer's step or an update in place; a change by `.data` is not seen."""
        return self.steps, shard._version, self._shard._version

    def make_room(self) -> None:
        """Has memory, of any values where it had none."""
        if self._storage.nbytes() != self._nbytes:  # torch moves the values, whatever the size was
            self._storage.resize_(self._nbytes)

    def take(self, shard: DTensor, state: object, time: int, *, keeps: bool) -> None:
        """Record that the buffer now holds the shard's values. keeps: keep the buffer after this call, whatever `stays` says."""
        self.time = time
        if self._last is not None and self._last != state:
            torch.autograd.graph.increment_version((self.leaf, self._local))
        self.filled = self._last = state
        is_free = self._lent is None and _uses(self._shard) == _USES_ALONE
        if (self.stays or keeps) and self._stretch is not None and is_free:
            self._lent = self._shard
            self._lent.data = self.memory[self._stretch]

    def drop(self) -> None:
        """Gives the memory back."""
        if self._lent is not None:
            self._lent.data = self._lent.clone()
            self._lent = None
        self._storage.resize_(0)
        self.filled = None


def _uses(tensor: Tensor) -> int:
    """The number of objects that share a tensor's memory, including the storage object made for this call."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_USES_ALONE = _uses(torch.empty(1))


def _hooked(shard: DTensor | None, grad: Tensor | None) -> Tensor | None:
    """The whole's gradient after the shard's `register_hook` hooks."""
    hooks = None if shard is None else shard._backward_hooks
    if grad is None or not hooks:
        return grad
    for hook in list(hooks.values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def _accumulated(whole: Whole | None, shard: DTensor | None) -> None:
    if whole is None:
        return
    for unit in list(whole.units):
        unit.accumulated(whole)
    if whole.synchronized_by is None and shard is not None and shard._post_accumulate_grad_hooks:
        raise RuntimeError(
            f"a parameter of shape {tuple(shard.shape)} lies on shards and has a hook of register_post_accumulate_grad_hook(), which "
            f"is called when the gradient of its shard is there: in the wait() of a GradientSync; keep a GradientSync(model)"
        )


class Wholes:
    """The sharded parameters of a model, the order of its units, and the passes after which values may have changed.

    Between two forward passes a program may change parameters without a trace: by `.data`, by foreach operators, through a view. So
    each forward pass gathers the parameters anew, on every rank alike; backward computes with the values of its forward.
    keeps: above 0, gathered buffers are kept. fixed_by: the holders of a promise that parameters do not change; while there is a holder,
    parameters are gathered once. time: the number of forward passes that gathered anew.
    """

    def __init__(self) -> None:
        self._of, self._leaves = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.units: list[Gathering] = []
        self.keeps = self.time = 0
        self.fixed_by: weakref.WeakSet[Any] = weakref.WeakSet()
        self._calls = 0  # of units, that are running
        self._in_forward = False  # of the model
        self._ending: dict[int, list[Gathering]] = {}  # by backward pass, the units that it has come to
        self._order: list[Gathering] = []  # in which the last forward opened them first
        self._opened: list[Gathering] = []  # in which this one does
        for hook in (
            register_optimizer_step_pre_hook(weakly(self._before_step)),
            register_optimizer_step_post_hook(weakly(self._after_step)),
        ):
            weakref.finalize(self, hook.remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> Wholes:
        memo[id(self)] = copied = Wholes()  # of other parameters; copies of the units add themselves
        return copied

    def get(self, shard: Tensor) -> Whole | None:
        """The whole of a parameter, if it was asked for before."""
        found: Whole | None = self._of.get(shard)  # type: ignore[no-untyped-call]
        return found

    def find(self, shard: DTensor, layout: Layout, unit: Gathering, *, stays: bool, sums: bool) -> Whole:
        """The whole of a parameter, made when it is first asked for."""
        whole = self.get(shard)
        if whole is None:
            whole = self._of[shard] = Whole(shard, layout, stays=stays, sums=sums)
            self._leaves[whole.leaf] = True
        whole.units.add(unit)
        whole.follow(shard)
        return whole

    def is_whole(self, parameter: Tensor) -> bool:
        """True where a unit has put it in the place of a shard."""
        return parameter in self._leaves

    def begin(self, *_: object) -> None:
        """Called before the model's forward."""
        if self._opened:
            self._order, self._opened = self._opened, []
        if not self._calls:
            self.renew()
        self._in_forward = True

    def end(self, *_: object) -> None:
        """Called after the model's forward."""
        self._in_forward = False

    def enter(self) -> None:
        """Called before a unit's forward, which is a pass of its own outside of the model's."""
        if not self._calls and not self._in_forward:
            self.renew()
        self._calls += 1

    def leave(self) -> None:
        """Called after a unit's forward."""
        self._calls -= 1

    def renew(self) -> None:
        """A new forward pass: gathered values may be old. Not in backward, where recomputation repeats a forward."""
        if in_backward():
            return
        self._ending.clear()
        for unit in self.units:  # of a backward pass that failed
            unit.end_pass()
        if not self.fixed_by:
            self.time += 1

    def settle_after_backward(self, unit: Gathering) -> None:
        """Calls the unit's `end_pass` when this backward pass is over, which may give no gradient to the unit's parameters."""
        number = torch._C._current_graph_task_id()
        if number not in self._ending:
            self._ending[number] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(number))
        self._ending[number].append(unit)

    def _end_backward(self, number: int) -> None:
        for unit in self._ending.pop(number, ()):
            unit.end_pass()

    def fix(self, by: Any) -> None:
        """A promise that parameters do not change until `by` is removed from `fixed_by`."""
        if by not in self.fixed_by:
            self.renew()
            self.fixed_by.add(by)

    def after(self, unit: Gathering) -> Gathering | None:
        """Notes that forward has come to a unit; the one that comes next, so far as the last forward tells."""
        if unit not in self._opened:
            self._opened.append(unit)
        index = self._order.index(unit) + 1 if unit in self._order else len(self._order)
        return self._order[index] if index < len(self._order) else None

    def before(self, unit: Gathering) -> Gathering | None:
        """The unit that backward comes to after this one."""
        order = self._opened if unit in self._opened else self._order
        earlier = order[: order.index(unit)] if unit in order else []
        return next((each for each in reversed(earlier) if each.goes_backward), None)

    def rest(self) -> None:
        """Gives back what a backward pass left whole, and what was gathered ahead in vain."""
        for unit in self.units:
            unit.rest()

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Refuses a step that would pass over gradients that are still whole."""
        for parameter in _parameters(optimizer):
            whole = self.get(parameter)
            if whole is not None and whole.leaf.grad is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() came before gradients were brought to the shards of their parameters, "
                    f"and would not apply them; keep a GradientSync(model), and call its wait() before the step"
                )

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Notes that shards have changed, which fused and foreach optimizers do not say by the versions of tensors."""
        for parameter in _parameters(optimizer):
            whole = self.get(parameter)
            if whole is not None:
                whole.steps += 1


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
