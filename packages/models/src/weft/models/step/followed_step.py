"""`follow_step`: runs a rank's step on shapes with all storages followed. `FollowedStep`: the bytes at each moment.

Read by `predict_memory`, and by `predict/memory.py`, which composes the memory of models of any depth.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels.extension import sharing_casts
from weft.reshard.extension import gathering_units, memory_of, tensors_of

from ..layers import embedding_tables
from ..parallel.parallelize import pipeline_of
from ..parallel.pipeline.step import Microbatch
from .communication import Phase
from .live_storages import BEFORE, LiveStorages, Storage
from .record import PreparedStep, StopStep

Device = Literal["cpu", "cuda"]
KINDS = (  # uses of memory: the fields of `Peak` in bytes
    "parameters",
    "gathered",
    "gradients",
    "buckets",
    "states",
    "activations",
    "recomputed",
    "logits",
    "messages",
    "workspace",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A rank's bytes by kind at a moment of a step: the moment with the most bytes, except from `FollowedStep.peak_at`.

    Made by `FollowedStep`, for `Memory.peak`; and by `compose`, for a model of any depth.
    Of the second step of a run, so the optimizer's states exist from the start.
    """

    phase: str  # "forward", "backward", "gradients" (sync and norm of the gradients) or "optimizer"
    # Name of the op that made the last storage still alive; "" for storages from before the step.
    op: str
    # Number of the block at work, from 0; -1 before the first block; after the last block, the number of blocks.
    # Without meaning in the phases "gradients" and "optimizer", in which no block is at work.
    place: int
    parameters: int
    gathered: int  # full copies of sharded parameters, beyond their shards
    gradients: int  # after the sum over ranks, in the layout for the optimizer: shards under zero=1, 2 and 3
    buckets: int  # gradients not reduced yet, and the flat tensors of the reduction
    states: int  # the optimizer's
    activations: int  # saved for backward, over all microbatches in flight
    recomputed: int  # activations computed again in backward
    logits: int  # made after the last block: logits, their gradient, the loss
    messages: int  # received from, or to be sent to, stages of other ranks
    workspace: int  # short-lived tensors, and buffers and inputs of the model

    @property
    def nbytes(self) -> int:
        """The sum over all kinds."""
        return sum(getattr(self, kind) for kind in KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on a rank: of a model, from `predict_memory`; or of a parameter, from `bytes_of_parameters`."""

    parameters: int  #: between steps: the rank's shards
    gathered: int  #: full copies of sharded parameters, kept between calls, beyond the shards
    gradients: int  #: of a program that keeps gradients between steps: shards under zero=2 and 3, else full gradients
    states: int  #: the optimizer's, between steps
    activations: int = 0  #: the most bytes saved for backward, over all microbatches in flight; 0 without a batch
    peak: Peak | None = None  #: of a step; None without a batch

    @property
    def between_steps(self) -> int:
        """Bytes independent of the batch: parameters, full copies, gradients and states."""
        return self.parameters + self.gathered + self.gradients + self.states

    @property
    def nbytes(self) -> int:
        """The peak of a step; without a batch, `between_steps`."""
        return self.between_steps if self.peak is None else self.peak.nbytes


def total_of(by_parameter: Mapping[str, Memory]) -> Memory:
    """A rank's bytes between steps, summed over the parameters. by_parameter: from `bytes_of_parameters`.

    Called by `FollowedStep`, and where no step runs by `predict_memory` and `weft explain`.
    """
    names = ("parameters", "gathered", "gradients", "states")
    return Memory(**{name: sum(getattr(each, name) for each in by_parameter.values()) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Bytes saved for backward at the end of a microbatch's forward. Made by `FollowedStep.saved_of_microbatch`.

    All fields but `shared` count tensors made by this microbatch's forward.
    """

    before: int  # before the first block
    inside: int  # in all blocks together
    after: int  # after the last block
    shared: int  # in all blocks together: tensors made by an earlier microbatch and still held, as casts of parameters
    message: int  # the largest tensor saved before the first block: [B, T, H], as sent between stages


@dataclass(frozen=True, slots=True)
class FollowedStep:
    """The storages of a rank's step on shapes. Made by `follow_step`; all methods are called after the step.

    Read by `predict_memory`, and by `memory_parts` and `saved_parts`, which compose memory for a model of any depth.
    """

    live: LiveStorages  # after the step
    num_blocks: int  # of the model, as `_blocks_of_list` finds blocks
    splits_backward: bool  # whether the schedule computes gradients of weights later than gradients of inputs
    kinds: Mapping[Storage, str]  # the kind of each storage, from `KINDS`
    by_parameter: Mapping[str, Memory]  # bytes between steps, by the parameter's name
    places: Mapping[str, int]  # each parameter's `Storage.place`, by the parameter's name

    def between_steps(self) -> Memory:
        """The rank's bytes between steps, summed over the parameters. For `predict_memory`, and for `peak_at`."""
        return total_of(self.by_parameter)

    def most_saved(self) -> int:
        """The most bytes saved for backward at the end of any forward or backward of a microbatch.

        Called by `predict_memory`, for `Memory.activations`.
        """
        at = self.live.bytes_at_moments(self._is_saved)
        return max((at[moment] for moment, phase in self.live.marks if phase in ("forward", "backward")), default=0)

    def _is_saved(self, each: Storage) -> bool:
        phases = ("forward", "backward") if self.splits_backward else ("forward",)
        is_new = self.kinds[each] not in ("parameters", "gathered", "gradients", "buckets") and each.born > 0
        return is_new and self.live.phase_at(each.born) in phases

    def saved_of_microbatch(self) -> SavedBytes:
        """The bytes saved for backward at the end of the last microbatch's forward.

        Called by `memory_parts` and `saved_parts`. Only for a step without stages, where no earlier microbatch is in
        flight.
        """
        number = max(number for number, (_, phase) in enumerate(self.live.marks) if phase == "forward")
        begin, end = self.live.marks[number - 1][0] if number else 0, self.live.marks[number][0]
        held = [each for each in self._alive(end) if self._is_saved(each)]
        saved = [each for each in held if each.born > begin]
        before = [each.nbytes for each in saved if each.place == BEFORE]
        return SavedBytes(
            before=sum(before),
            inside=sum(each.nbytes for each in saved if BEFORE < each.place < self.num_blocks),
            after=sum(each.nbytes for each in saved if each.place >= self.num_blocks),
            shared=sum(each.nbytes for each in held if each.born <= begin and BEFORE < each.place < self.num_blocks),
            message=max(before, default=0),
        )

    def peak(self) -> Peak:
        """The rank's bytes by kind at the step's moment of the most bytes. Called by `predict_memory`.

        Cost: passes over all storages.
        """
        at = self.live.bytes_at_moments()
        return self.peak_at(max(range(len(at)), key=at.__getitem__))

    def peak_at(self, moment: int) -> Peak:
        """The rank's bytes by kind at a moment. Called by `peak`, and by `memory_parts` for a moment of each phase."""
        counts = dict.fromkeys(KINDS, 0)
        last: Storage | None = None
        for each in self._alive(moment):
            counts[self.kinds[each]] += each.nbytes
            last = each
        total = self.between_steps()
        # `adopt` may have counted a full copy, with its shard, as parameters: the rest beyond the shards is gathered.
        counts["gathered"] += counts["parameters"] - total.parameters
        counts |= {"parameters": total.parameters, "states": total.states}
        place = next(place for start, place in reversed(self.live.places) if start <= moment)
        return Peak(phase=self.live.phase_at(moment), op=last.op if last else "", place=place, **counts)

    def outside_at(self, moment: int) -> tuple[dict[str, float], dict[str, float]]:
        """The part outside the blocks of the bytes of `peak_at`, by kind: (before the first block, after the last).

        Called by `memory_parts`: ranks without the first stage, or without the last, do not hold these bytes.
        """
        before, after = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
        for each in self._alive(moment):
            counts = before if each.place == BEFORE else after if each.place >= self.num_blocks else None
            if counts is not None:
                counts[self.kinds[each]] += each.nbytes
        for name, held in self.by_parameter.items():
            place = self.places.get(name, BEFORE)
            counts = before if place == BEFORE else after if place >= self.num_blocks else None
            if counts is not None:
                counts["states"] += held.states
                # with the next loop: parameters' memory beyond the shards counts as gathered
                counts["gathered"] -= held.parameters
        for counts in (before, after):
            counts["gathered"] += counts["parameters"]
            counts["parameters"] = 0.0
        for name, held in self.by_parameter.items():
            place = self.places.get(name, BEFORE)
            if place == BEFORE or place >= self.num_blocks:
                (before if place == BEFORE else after)["parameters"] += held.parameters
        return before, after

    def stretches(self) -> list[tuple[int, int, str, int]]:
        """The step cut into stretches of moments, each in a single phase at a single place, in order.

        Returns (first moment, moment after the last, phase, place) for each. Called by `memory_parts`, which looks for
        the moment of the most bytes in each stretch.
        """
        ends = [(moment + 1, "") for moment, _ in self.live.marks] + [(start, "") for start, _ in self.live.places]
        cuts = sorted({0, *(moment for moment, _ in ends), self.live.now + 1})
        found = []
        for start, stop in pairwise(cuts):
            place = next(place for at, place in reversed(self.live.places) if at <= start)
            found.append((start, stop, self.live.phase_at(start), place))
        return found

    def _alive(self, moment: int) -> Iterator[Storage]:
        return (each for each in self.live.storages if each.is_alive(moment) and self.live.counts(each))


def follow_step(
    ready: PreparedStep,
    by_parameter: Mapping[str, Memory],
    *,
    clip_norm: float | None = None,
    device: Device = "cuda",
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    has_shared_casts: bool = False,
    only_forward: bool = False,
) -> FollowedStep:
    """Run the step twice on shapes, and follow the storages of the second run. Called by `follow_model`.

    The first run makes the tensors kept between steps, such as the buffers of gathered parameters, and optimizer
    states. Without stages, a single microbatch makes all of these tensors.
    by_parameter: from `bytes_of_parameters`. has_shared_casts: whether the microbatches of a model without stages
        share the casts of parameters, as the microbatches of a stage do. only_forward: run each microbatch's forward
        alone, for `FollowedStep.saved_of_microbatch`. Further arguments: as for `predict_memory`.
    """
    model, pipeline = ready.model, pipeline_of(ready.model)
    optimizer = None if make_optimizer is None else make_optimizer(model)
    if device == "cpu":
        ready.recorded.prefers_all_to_all = True  # as gloo does

    def end_step() -> None:
        if optimizer is not None:
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None

    def after_phase(phase: Phase) -> None:
        if pipeline is not None:
            pipeline.finish_sends()
        live.mark(phase)

    def run_forward(microbatch: Microbatch, after_forward: Callable[[Phase], None]) -> None:
        def stop(phase: Phase) -> None:
            after_forward(phase)
            raise StopStep

        replace(ready, microbatches=[microbatch] * 2).run(stop)  # the last microbatch would start the loss's sum

    casts = sharing_casts if has_shared_casts else nullcontext
    first = ready if pipeline is not None else replace(ready, microbatches=ready.microbatches[:1])
    with casts():
        if only_forward:
            run_forward(ready.microbatches[0], lambda phase: None)
        else:
            first.run(lambda phase: None, clip_norm=clip_norm)
    end_step()
    if optimizer is not None:
        states = {name: _nbytes(optimizer.state[each].values()) for name, each in model.named_parameters()}
        by_parameter = {name: replace(each, states=states.get(name, 0)) for name, each in by_parameter.items()}
    blocks = _blocks_of_list(model)
    live = LiveStorages(blocks, by_op=device == "cuda")
    full_copies = {
        shard: full.leaf for unit in gathering_units(model) for shard, full in unit.full_parameters().items()
    }
    own_parameters = dict(model.named_parameters())
    places = _places(model, blocks)
    for name, parameter in own_parameters.items():
        live.adopt([parameter], "parameters", places[name])
        if isinstance(parameter, DTensor) and parameter in full_copies:
            live.adopt([full_copies[parameter]], "gathered", places[name])
    live.adopt(model.buffers(), "workspace")
    live.adopt(tensors_of([(each.args, each.kwargs, each.targets) for each in ready.microbatches]), "workspace")
    with live:
        with casts():
            if only_forward:
                for microbatch in ready.microbatches:
                    live.begin_forward()
                    run_forward(microbatch, after_phase)
            else:
                ready.run(after_phase, clip_norm=clip_norm)
        for name, parameter in own_parameters.items():
            if parameter.grad is not None:
                live.relabel([parameter.grad], "gradients", places[name])
        end_step()
        live.mark("optimizer")
    splits = pipeline is not None and pipeline.schedule.splits_backward
    return FollowedStep(
        live, len(blocks), splits, _kinds(live, len(blocks), pipeline is not None), by_parameter, places
    )


def _blocks_of_list(model: nn.Module) -> list[nn.Module]:
    """A model's blocks: the members of the longest nn.ModuleList that is in no nn.ModuleList; [] without a list."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = [each for name, each in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    return list(max(outermost, key=len, default=()))


def _places(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, int]:
    """The place of each parameter by name: the block's; BEFORE for an nn.Embedding's; else after the last block."""
    of_blocks = {each: number for number, block in enumerate(blocks) for each in block.parameters()}
    tables = embedding_tables(model)
    return {
        name: of_blocks.get(each, BEFORE if each in tables else len(blocks)) for name, each in model.named_parameters()
    }


def _nbytes(values: Iterable[Any]) -> int:
    tensors = (each for each in values if isinstance(each, Tensor))
    return sum((memory_of(each) if isinstance(each, DTensor) else each).nbytes for each in tensors)


def _kinds(live: LiveStorages, num_blocks: int, has_stages: bool) -> dict[Storage, str]:
    """The kind of each storage: `Storage.kind` if set, else by place, phase and lifetime."""
    ends = [moment for moment, _ in live.marks]
    kinds = {}
    for each in live.storages:
        number = bisect_left(ends, each.born)
        phase = live.marks[number][1] if number < len(ends) else "optimizer"
        if each.kind is not None:
            kind = each.kind
        elif has_stages and not each.in_module and phase in ("forward", "backward") and not each.in_backward:
            kind = "messages"
        elif each.place == num_blocks and phase in ("forward", "backward"):
            kind = "logits"
        elif phase == "forward" and each.is_alive(ends[number]):
            kind = "activations"
        elif each.in_backward and each.in_module:
            kind = "recomputed"
        else:
            kind = "workspace"
        kinds[each] = kind
    return kinds
