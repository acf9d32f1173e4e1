"""Full-size copies of sharded parameters (`FullParameter`), and the state a model's units share (`ModelGathering`).

unit.py fills, uses and frees the copies; gradient_sync.py reduces their gradients into the shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary
from weft.mesh import Layout

from ..moving.dtensor import layout_of, memory_of, wrap
from ..world.groups import this_rank
from .hooks import after_step, backward_is_running, before_step, takes_none


class GatheringUnit(Protocol):
    """A group of parameters gathered together: the methods of unit.py's `Unit` called in this file."""

    goes_backward: bool  # whether backward has ever come to this unit; if not, backward does not prefetch the unit

    @property
    def expects_backward(self) -> bool:
        """Whether backward may still give gradients of the unit's parameters, by the calls so far."""

    def prefetch(self) -> None:
        """Starts to gather parameters ahead of the module's call, where full copies are missing or out of date."""

    def on_grad_accumulated(self, full: FullParameter) -> None:
        """Called when backward has added the last gradient to a full copy."""

    def end_pass(self) -> None:
        """Called when a backward pass is over: no more gradients will come."""


def contiguous_shard_slices(shard: Layout, full: Layout, shape: Sequence[int], rank: int) -> tuple[slice, ...] | None:
    """The slices that cut a rank's shard from the rank's local tensor in the layout `full`. Called by FullParameter.

    None where the shard is not contiguous in the local tensor. shape: global, of the parameter.
    """
    held, outer = shard.local_slices(shape, rank), full.local_slices(shape, rank)
    slices = tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(held, outer, strict=True))
    sizes = [b.stop - b.start for b in outer]
    cut = next((i for i, (a, size) in enumerate(zip(slices, sizes, strict=True)) if a != slice(0, size)), len(slices))
    return slices if all(size == 1 for size in sizes[:cut]) else None


class FullParameter:
    """The full-size copy of a sharded parameter, with which the parameter's module computes.

    Made by `ModelGathering.find_or_make`. An autograd leaf over a buffer, freed and refilled in turn. Tensors saved for
    backward share the buffer. With `keep_between_calls`, or gathered inside `keep_gathered`, a contiguous shard becomes
    a view into the buffer, and takes no further memory. Where the program has views of the shard, the shard keeps
    separate memory, because the views must stay valid.
    layout: of the full copy.
    keep_between_calls: keep the buffer between calls (ZeRO 1, 2).
    accumulate_grad: let the gradient accumulate over backward passes (ZeRO 1).
    """

    def __init__(self, shard: DTensor, layout: Layout, *, keep_between_calls: bool, accumulate_grad: bool) -> None:
        part = layout.local_shape(shard.shape, this_rank())
        with torch.inference_mode(False):  # a tensor made in inference mode could not be used in training later
            local = torch.empty(part, dtype=shard.dtype, device=memory_of(shard).device)
            self.leaf = nn.Parameter(wrap(local, layout, shard.shape), requires_grad=False)
            assert isinstance(self.leaf, DTensor), "nn.Parameter of a DTensor is a DTensor"
            # the tensors inside the shard and inside `leaf`
            self._shard, self._local = memory_of(shard), memory_of(self.leaf)
            # Filled by way of .data, unseen by autograd: refilling with equal values is no change.
            self.buffer = self._local.data
        self._shard_slices = contiguous_shard_slices(layout_of(shard), layout, shard.shape, this_rank())
        self._shard_view: Tensor | None = None  # `_shard` while a view into the buffer, else None
        self._storage = self._local.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._storage.resize_(0)
        self.layout, self.keep_between_calls, self.accumulate_grad = layout, keep_between_calls, accumulate_grad
        self.active_units = 0  # number of units with the copy in use, or kept for backward; freed only at 0
        self.filled_state: object = None  # the shard's state when the buffer was filled; None without memory
        self.pass_filled = 0  # `ModelGathering.pass_number` when the buffer was filled
        self._last_filled_state: object = None  # `filled_state`, also after the buffer is freed
        self.optimizer_steps = 0  # counted, because some optimizers change a tensor and not its version
        self.units: weakref.WeakSet[GatheringUnit] = weakref.WeakSet()  # units that compute with the copy
        self.synchronized_by: object = None  # weak reference to the GradientSync that reduces gradients into the shard
        self._hooked = False  # whether the hooks on `leaf` are set

    def update_requires_grad(self, shard: DTensor) -> None:
        """Makes the full copy require a gradient exactly where the shard does.

        Where both do, the shard's gradient hooks are called with the full copy's gradient.
        """
        requires_grad = shard.requires_grad
        if self.leaf.requires_grad != requires_grad:
            self.leaf.requires_grad_(requires_grad)
        if requires_grad and not self._hooked:
            weak_self, weak_shard, self._hooked = weakref.ref(self), weakref.ref(shard), True
            before = takes_none(lambda grad: _call_shard_hooks(weak_shard(), grad))
            after = takes_none(lambda _: _notify_units(weak_self(), weak_shard()))
            self.leaf.register_hook(before)  # type: ignore[no-untyped-call]
            self.leaf.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]

    def state_of(self, shard: DTensor) -> object:
        """A value that changes with each optimizer's step and in-place update of the shard, but not with `.data`."""
        return self.optimizer_steps, shard._version, self._shard._version

    def allocate(self) -> None:
        """Gives a freed buffer memory; the values are undefined then."""
        if self._storage.nbytes() != self._nbytes:  # resize_ copies the values, even to the same size
            self._storage.resize_(self._nbytes)

    def mark_filled(self, state: object, pass_number: int, *, keep_after_call: bool) -> None:
        """Records that the buffer holds the shard's values.

        Called by the unit whose gather filled the buffer. keep_after_call: whether a `keep_gathered` runs: the buffer
        is then kept after the unit's call, even without `keep_between_calls`.
        """
        self.pass_filled = pass_number
        if self._last_filled_state is not None and self._last_filled_state != state:
            # A backward that saved the old values now raises, as after any in-place change.
            torch.autograd.graph.increment_version((self.leaf, self._local))
        self.filled_state = self._last_filled_state = state
        is_unshared = self._shard_view is None and _storage_uses(self._shard) == _USES_WHEN_UNSHARED
        if (self.keep_between_calls or keep_after_call) and self._shard_slices is not None and is_unshared:
            self._shard_view = self._shard
            self._shard_view.data = self.buffer[self._shard_slices]

    def separate_shard(self) -> None:
        """Gives a shard viewing the buffer separate memory. The shard may become a view at the next gather."""
        if self._shard_view is not None:
            self._shard_view.data = self._shard_view.clone()
            self._shard_view = None

    def free(self) -> None:
        """Frees the buffer's memory; a shard viewing the buffer gets separate memory first."""
        self.separate_shard()
        self._storage.resize_(0)
        self.filled_state = None


def _storage_uses(tensor: Tensor) -> int:
    """The number of objects with a share in a tensor's memory, including the storage object made for this call."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_USES_WHEN_UNSHARED = _storage_uses(torch.empty(1))


def _call_shard_hooks(shard: DTensor | None, grad: Tensor | None) -> Tensor | None:
    """Passes the full copy's gradient through the shard's `register_hook` hooks."""
    hooks = None if shard is None else shard._backward_hooks
    if grad is None or not hooks:
        return grad
    for hook in list(hooks.values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def _notify_units(full: FullParameter | None, shard: DTensor | None) -> None:
    if full is None:
        return
    for unit in list(full.units):
        unit.on_grad_accumulated(full)
    if full.synchronized_by is None and shard is not None and shard._post_accumulate_grad_hooks:
        raise RuntimeError(
            f"a sharded parameter of shape {tuple(shard.shape)} has a hook of register_post_accumulate_grad_hook(), "
            f"which is called in the wait() of a GradientSync, once the shard has its gradient; keep a "
            f"GradientSync(model)"
        )


class ModelGathering:
    """The state shared by a model's units: the sharded parameters, the units' order, the number of forward passes.

    Between two forward passes a program may change parameters without a trace: by `.data`, by foreach operators,
    through a view. Each forward pass therefore gathers the shards, on every rank alike, unless a promise holds that
    parameters do not change (`promise_fixed`). Backward computes with the values from forward.
    """

    def __init__(self) -> None:
        self._full_of_shard = WeakTensorKeyDictionary()
        self._full_leaves = WeakTensorKeyDictionary()  # a set: `FullParameter.leaf` of each full copy -> True
        self.units: list[GatheringUnit] = []
        self.started_gathers = 0  # number of gathers that units have started
        self.gather_hooks: list[Callable[[], None]] = []  # called in backward, before a gather starts
        self.keep_gathered_blocks = 0  # number of running `keep_gathered` blocks; above 0, full copies are not freed
        # Rises at each forward pass without a promise, and just before the first promise. A full copy filled in an
        # earlier pass is out of date.
        self.pass_number = 0
        # Holders of a promise that parameters do not change: a GradientSync, or a `fixed_parameters` block. While there
        # is a holder, a filled full copy is out of date only if `state_of` shows a change of the shard.
        self.promise_holders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._running_calls = 0  # number of running calls of units
        self._in_forward = False  # whether the model's forward runs
        # {autograd's number of a running backward pass: the units to which the pass has come}
        self._units_in_backward: dict[int, list[GatheringUnit]] = {}
        self._last_order: list[GatheringUnit] = []  # units in the order of the last forward pass
        self._present_order: list[GatheringUnit] = []  # units in the order of the present forward pass, so far
        before_step.add(self._before_step)
        after_step.add(self._after_step)

    def __reduce__(self) -> tuple[type[ModelGathering], tuple[()]]:
        """A copied or pickled model has new parameters, and no full copies; the model's units add themselves."""
        return ModelGathering, ()

    def get(self, shard: Tensor) -> FullParameter | None:
        """The full copy of a shard; None before `find_or_make`."""
        found: FullParameter | None = self._full_of_shard.get(shard)  # type: ignore[no-untyped-call]
        return found

    def find_or_make(
        self, shard: DTensor, layout: Layout, unit: GatheringUnit, *, keep_between_calls: bool, accumulate_grad: bool
    ) -> FullParameter:
        """The full copy of a shard, made on the first request."""
        full = self.get(shard)
        if full is None:
            full = self._full_of_shard[shard] = FullParameter(
                shard, layout, keep_between_calls=keep_between_calls, accumulate_grad=accumulate_grad
            )
            self._full_leaves[full.leaf] = True
        full.units.add(unit)
        full.update_requires_grad(shard)
        return full

    def is_full(self, parameter: Tensor) -> bool:
        """Whether `parameter` is a full copy in a shard's place."""
        return parameter in self._full_leaves

    def before_forward(self, *_: object) -> None:
        """Hook before the model's forward."""
        if self._present_order:
            self._last_order, self._present_order = self._present_order, []
        if not self._running_calls:
            self.begin_pass()
        self._in_forward = True

    def after_forward(self, *_: object) -> None:
        """Hook after the model's forward."""
        self._in_forward = False

    def enter_unit(self) -> None:
        """Called before a unit's forward. Outside the model's forward this begins a pass."""
        if not self._running_calls and not self._in_forward:
            self.begin_pass()
        self._running_calls += 1

    def leave_unit(self) -> None:
        """Called after a unit's forward."""
        self._running_calls -= 1

    def begin_pass(self) -> None:
        """Marks gathered values as out of date at the start of a forward pass, unless a promise holds.

        Does nothing in backward, where a recomputation repeats a forward.
        """
        if backward_is_running():
            return
        self._units_in_backward.clear()
        for unit in self.units:  # a failed backward pass may have left state behind
            unit.end_pass()
        if not self.promise_holders:
            self.pass_number += 1

    def call_gather_hooks(self) -> None:
        """Called in backward, before a unit starts a gather."""
        for hook in list(self.gather_hooks):
            hook()

    def end_pass_after_backward(self, unit: GatheringUnit) -> None:
        """Has autograd call the unit's `end_pass` when the running backward pass is over.

        Called by the unit when backward comes to a call. The pass may end without a gradient for some of the
        unit's parameters.
        """
        number = torch._C._current_graph_task_id()
        if number not in self._units_in_backward:
            self._units_in_backward[number] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(number))
        self._units_in_backward[number].append(unit)

    def _end_backward(self, number: int) -> None:
        for unit in self._units_in_backward.pop(number, ()):
            unit.end_pass()

    def promise_fixed(self, holder: Any) -> None:
        """Promises that parameters do not change until `holder` is removed from `promise_holders`."""
        if holder not in self.promise_holders:
            self.begin_pass()
            self.promise_holders.add(holder)

    def next_in_forward(self, unit: GatheringUnit) -> GatheringUnit | None:
        """Record that forward has come to `unit`. Returns the next unit in the order of the last pass, or None."""
        if unit not in self._present_order:
            self._present_order.append(unit)
        index = self._last_order.index(unit) + 1 if unit in self._last_order else len(self._last_order)
        return self._last_order[index] if index < len(self._last_order) else None

    def next_in_backward(self, unit: GatheringUnit) -> GatheringUnit | None:
        """The unit to which backward comes after `unit`; None where `unit` is the last."""
        order = self._present_order if unit in self._present_order else self._last_order
        earlier = order[: order.index(unit)] if unit in order else []
        return next((each for each in reversed(earlier) if each.goes_backward), None)

    def _before_step(self, optimizer: Optimizer) -> None:
        """Refuses an optimizer's step while gradients are still on full copies: the step would miss these."""
        for parameter in _parameters(optimizer):
            full = self.get(parameter)
            if full is not None and full.leaf.grad is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() came before gradients were reduced to the parameters' shards, "
                    f"and would miss them; keep a GradientSync(model), and call its wait() before the step"
                )

    def _after_step(self, optimizer: Optimizer) -> None:
        """Counts the step of each changed shard: fused and foreach optimizers do not increase tensors' versions."""
        for parameter in _parameters(optimizer):
            full = self.get(parameter)
            if full is not None:
                full.optimizer_steps += 1


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
