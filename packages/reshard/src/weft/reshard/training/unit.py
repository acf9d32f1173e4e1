"""`Unit`: the sharded parameters of a module, gathered for forward, freed, and gathered a second time for backward.

A unit's call swaps the shards for full copies (full_parameters.py), runs the module, and swaps back. Hooks on the
call's inputs and outputs tell when backward enters and leaves the module. While a unit computes, the gather of the next
unit runs ahead: a prefetch. gathered_modules.py makes units of modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.mesh import Layout

from .full_parameters import FullParameter, GatheringUnit, ModelGathering
from .gathering import Gather, GatherBatch
from .hooks import backward_is_running, differentiable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterSlot:
    """The attribute `module.name` which holds a sharded parameter. A unit has a slot for each parameter to gather.

    Made by weft.models' parallel/parameter_layouts.py. The slot holds the shard between the unit's calls, and the
    shard's full copy while the unit computes.
    """

    module: nn.Module
    name: str
    layout: Layout  # the full copy's layout, in which the module computes
    keep_between_calls: bool  # keep the full copy between calls (ZeRO 1, 2)
    accumulate_grad: bool  # let the full copy's gradient accumulate over backward passes (ZeRO 1)

    @property
    def parameter(self) -> DTensor:
        """The parameter now in the slot: the shard, or the full copy while the unit computes."""
        parameter = self.module._parameters[self.name]
        assert isinstance(parameter, DTensor), "a sharded parameter is a DTensor, also after to() and to_empty()"
        return parameter


_Entry = tuple[ParameterSlot, DTensor, FullParameter]  # a slot, its shard, and the shard's full copy


class _Fill(NamedTuple):
    """A full copy that a gather is to fill."""

    shard: DTensor
    full: FullParameter
    state: object  # the shard's state when the gather started


class _Prefetch(NamedTuple):
    """A gather under way."""

    gathers: GatherBatch
    fills: list[_Fill]
    pass_number: int  # `ModelGathering.pass_number` when the gather started


class Unit:
    """The sharded parameters of a module, gathered together.

    Made by `gather_when_called`. keep_for_backward: keep the full copies of forward until backward.
    """

    def __init__(
        self, model_gathering: ModelGathering, slots: Sequence[ParameterSlot], *, keep_for_backward: bool
    ) -> None:
        self.model_gathering = model_gathering  # the state shared by the units of the model
        self._slots, self._keep_for_backward = list(slots), keep_for_backward
        self._running_calls = 0  # number of running `call`s
        self._swapped: list[tuple[ParameterSlot, DTensor]] = []  # slots that hold full copies now, and their shards
        self._in_use: list[FullParameter] = []  # full copies in use by this unit; not freed
        # For each slot, the shard and full copy found by the last `_entries`; None before the first.
        self._copies: list[tuple[DTensor, FullParameter] | None] = []
        self._gathers: dict[tuple[FullParameter, ...], GatherBatch] = {}  # by the full copies to fill
        self._prefetch: _Prefetch | None = None
        self._calls_before_backward: set[_Call] = set()  # calls whose full copies are kept for backward
        # Calls with a graph, to which backward may come; a call without inputs stays here until the graph is freed.
        self._expected_calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self._calls_in_backward: set[_Call] = set()  # calls whose backward runs
        # Full copies whose gradient this backward pass has not completed.
        self._awaiting_grad: set[FullParameter] = set()
        self.goes_backward = False  # whether backward has ever come to this unit
        model_gathering.units.append(self)

    def __getstate__(self) -> tuple[ModelGathering, list[ParameterSlot], bool]:
        """A copied or pickled unit has no full copies."""
        return self.model_gathering, self._slots, self._keep_for_backward

    def __setstate__(self, state: tuple[ModelGathering, list[ParameterSlot], bool]) -> None:
        model_gathering, slots, keep_for_backward = state
        Unit.__init__(self, model_gathering, slots, keep_for_backward=keep_for_backward)

    def full_parameters(self) -> dict[DTensor, FullParameter]:
        """{shard: full copy}, for GradientSync and weft.models' measurements, between calls: slots then hold shards."""
        return {shard: full for _, shard, full in self._entries()}

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `forward` with full copies as parameters, and returns the output. Communication: a gather if needed."""
        self.model_gathering.enter_unit()
        self._running_calls += 1
        try:
            self._swap_in()
            _prefetch(self.model_gathering.next_in_forward(self))
            output = forward(*args, **kwargs)
            if torch.is_grad_enabled():
                self._hook_call((args, kwargs), output)
        finally:
            self._running_calls -= 1
            self.model_gathering.leave_unit()
            self._release()
        return output

    @property
    def expects_backward(self) -> bool:
        """Whether backward may still give gradients of the unit's parameters, by the calls so far."""
        return bool(self._expected_calls)

    def begin_backward(self, call: _Call) -> None:
        """Called when backward comes to a call. Communication: a gather, where the full copies were freed."""
        self.goes_backward = True
        self._calls_before_backward.discard(call)
        if call.input_count:
            self._calls_in_backward.add(call)
        self._swap_in()
        self._awaiting_grad.update(full for full in self._in_use if full.leaf.requires_grad)
        self.model_gathering.end_pass_after_backward(self)
        _prefetch(self.model_gathering.next_in_backward(self))

    def end_pass(self) -> None:
        """Called after a backward pass, or before the next forward if the pass failed: no more gradients will come."""
        if not self._running_calls and (self._calls_in_backward or self._awaiting_grad):
            self._clear_backward()
            self._release()

    def end_backward(self, call: _Call) -> None:
        """Called when backward has the gradients of a call's inputs."""
        self._calls_in_backward.discard(call)
        self._expected_calls.discard(call)
        self._release()

    def on_grad_accumulated(self, full: FullParameter) -> None:
        """Called by a full copy's hook once backward has added the gradient. The last such call may free the copies."""
        if full in self._awaiting_grad:
            self._awaiting_grad.discard(full)
            self._release()

    def prefetch(self) -> None:
        """Starts to gather missing or outdated full copies, ahead of the module's turn. Called by the running unit."""
        if self._prefetch is None and not self._swapped:
            self._start_gather(self._entries())

    def release_idle(self) -> None:
        """Drops a prefetch and frees full copies, unless a call runs. Copies with `keep_between_calls` stay.

        Called once gradients are synchronized, and at the end of `keep_gathered`.
        """
        if self._running_calls:
            return
        if self._prefetch is not None:
            self._prefetch.gathers.discard()
            self._prefetch = None
        self._clear_backward()
        self._calls_before_backward.clear()
        self._release()

    def _clear_backward(self) -> None:
        for call in self._calls_in_backward:
            call.missing_input_grads = 0
        self._calls_in_backward.clear()
        self._awaiting_grad.clear()

    def drop(self) -> None:
        """Frees all full copies, also with `keep_between_calls`, for `drop_gathered`. The next call gathers again."""
        self.release_idle()
        for full in self.full_parameters().values():
            if not full.active_units:
                full.free()

    def separate_shards(self) -> None:
        """Gives shards that are views of full copies separate memory. Called before the module's `state_dict()`.

        torch cannot deepcopy a DTensor whose local tensor begins inside a storage, as shards of later ranks would.
        """
        for slot in self._slots:
            full = self.model_gathering.get(slot.parameter)
            if full is not None:
                full.separate_shard()

    def _entries(self) -> list[_Entry]:
        """Each slot with its shard and full copy, except slots whose parameter an enclosing unit has swapped."""
        if len(self._copies) < len(self._slots):
            self._copies = [None] * len(self._slots)
        entries = []
        for i, (slot, copies) in enumerate(zip(self._slots, self._copies, strict=True)):
            parameter = slot.parameter
            if copies is None or copies[0] is not parameter:
                if self.model_gathering.is_full(parameter):
                    continue
                full = self.model_gathering.find_or_make(
                    parameter,
                    slot.layout,
                    self,
                    keep_between_calls=slot.keep_between_calls,
                    accumulate_grad=slot.accumulate_grad,
                )
                self._copies[i] = copies = parameter, full
                self._gathers.clear()
            shard, full = copies
            full.update_requires_grad(shard)
            entries.append((slot, shard, full))
        return entries

    def _start_gather(self, entries: Sequence[_Entry]) -> None:
        """Starts to gather the full copies that are stale.

        A full copy is stale if the shard has changed since the copy was filled. In forward, a copy filled in an earlier
        pass is stale, too; backward computes with the values of forward.
        """
        states = {full: (shard, full.state_of(shard)) for _, shard, full in entries}
        pass_number = self.model_gathering.pass_number
        in_forward = not backward_is_running()
        fills = [
            _Fill(shard, full, state)
            for full, (shard, state) in states.items()
            if full.filled_state != state or (in_forward and full.pass_filled != pass_number)
        ]
        if not fills:
            return
        if not in_forward:
            self.model_gathering.call_gather_hooks()
        key = tuple(full for _, full, _ in fills)
        if key not in self._gathers:
            for full in key:
                full.allocate()
            self._gathers[key] = GatherBatch([Gather(shard, full.layout, full.buffer) for shard, full, _ in fills])
            for full in key:
                if full.filled_state is None:
                    full.free()
        self.model_gathering.started_gathers += 1
        self._gathers[key].start()
        self._prefetch = _Prefetch(self._gathers[key], fills, pass_number)

    def _swap_in(self) -> None:
        """Puts full copies with present values into the slots. Communication: a gather of stale copies."""
        if self._swapped:
            return
        entries = self._entries()
        self._finish_prefetch()
        self._start_gather(entries)  # of copies still stale: without a prefetch, or changed since its start
        self._finish_prefetch()
        for slot, shard, full in entries:
            assert full.filled_state is not None, "the gather above has filled it"
            if full not in self._in_use:
                self._in_use.append(full)
                full.active_units += 1
            self._swapped.append((slot, shard))
            slot.module._parameters[slot.name] = full.leaf

    def _finish_prefetch(self) -> None:
        """Fills the full copies by the gather under way; drops it if a shard changed or `pass_number` rose since."""
        if self._prefetch is None:
            return
        gathers, fills, pass_number = self._prefetch
        self._prefetch = None
        is_stale = pass_number != self.model_gathering.pass_number
        if is_stale or any(full.state_of(shard) != state for shard, full, state in fills):
            gathers.discard()
            return
        for _, full, _ in fills:
            full.allocate()
        gathers.finish()
        for _, full, state in fills:
            full.mark_filled(state, pass_number, keep_after_call=self.model_gathering.keep_gathered_blocks > 0)

    def _release(self) -> None:
        """Swaps the shards back in, unless forward or backward of the module runs. Then frees unused full copies.

        No copy is freed while a call waits for backward with kept copies, or inside `keep_gathered`.
        """
        if self._running_calls or self._calls_in_backward or self._awaiting_grad:
            return
        for slot, shard in self._swapped:
            slot.module._parameters[slot.name] = shard  # type: ignore[assignment]  # a DTensor that is a Parameter
        self._swapped.clear()
        if self._calls_before_backward or self.model_gathering.keep_gathered_blocks:
            return
        for full in self._in_use:
            full.active_units -= 1
            if not full.active_units and not full.keep_between_calls:
                full.free()
        self._in_use.clear()

    def _hook_call(self, arguments: object, output: object) -> None:
        if self._calls_in_backward or self._awaiting_grad:
            return  # a recomputation in backward: the call is known
        outputs = differentiable(output)
        call = _Call(self, differentiable(arguments))
        if outputs:
            self._expected_calls.add(call)
        if self._keep_for_backward or not outputs:  # without an output to hook, nothing tells when backward comes
            self._calls_before_backward.add(call)
        for each in outputs:
            # A node's own hook comes after the hooks on its tensors: an output is often the input of a later call, and
            # the backward of the later call is to end before the backward of this call begins.
            register = each.register_hook if each.grad_fn is None else each.grad_fn.register_prehook
            register(call.on_output_grad)


def _prefetch(unit: GatheringUnit | None) -> None:
    if unit is not None:
        unit.prefetch()


class _Call:
    """A call of a unit's module, from forward to the end of backward; hooks tell the unit."""

    def __init__(self, unit: Unit, inputs: Sequence[Tensor]) -> None:
        self._unit, self.input_count = unit, len(inputs)
        self.missing_input_grads = 0  # inputs whose gradient backward has not computed; 0 outside backward
        for each in inputs:
            each.register_hook(self._on_input_grad)  # type: ignore[no-untyped-call]

    def on_output_grad(self, _: Tensor) -> None:
        """Hook: backward has the gradient of an output. The first output begins the call's backward.

        A call without inputs calls `begin_backward` again at each further output, when the full copies are already in
        place.
        """
        if not self.missing_input_grads:
            self.missing_input_grads = self.input_count
            self._unit.begin_backward(self)

    def _on_input_grad(self, _: Tensor) -> None:
        """Hook: backward has the complete gradient of an input. The last input ends the call's backward."""
        if self.missing_input_grads:
            self.missing_input_grads -= 1
            if not self.missing_input_grads:
                self._unit.end_backward(self)
