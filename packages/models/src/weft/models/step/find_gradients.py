"""The communicating part of a training step: forward, backward, gradient sync and clipping.

Training runs `find_gradients` on data; the recording behind predictions and `weft explain` runs it on shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from weft.reshard import GradientSync, clip_grad_norm_
from weft.reshard.extension import exact_axes, with_fixed_parameters

from ..config import MixtureConfig
from ..losses import LossSum, first_gradient, without_graph
from ..parallel.parallelize import pipeline_of, with_exact_sums
from ..parallel.pipeline.run import Pipeline
from ..parallel.pipeline.step import CallContext, Microbatch
from ..tracing import traced
from .communication import Phase
from .criterion import Criterion
from .exact_refusals import refusing_torch_sums
from .loss_parts import LossWithParts, RouterLosses, RouterReport, StepParts, add_results, num_sums_of, split_loss


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step: tensors on the device. Returned by `find_gradients`, read by `Trainer`."""

    loss: Tensor  # scalar: the loss of the whole batch, the same on every rank
    local_loss: Tensor  # scalar: the sum of this rank's losses before the sum over ranks; finds the ranks with a NaN
    grad_norm: Tensor | None  # scalar: the norm of the gradients before clipping; None without clip_norm
    parts: RouterReport | None = None  # the routers' losses, under `RouterLosses`; else None
    sums: Tensor | None = None  # [n]: `LossWithParts.sums` of the criterion, summed over the whole batch; None without


@with_fixed_parameters
@with_exact_sums
@refusing_torch_sums
def find_gradients(
    model: nn.Module,
    criterion: Criterion,
    microbatches: Sequence[Microbatch],
    sync: GradientSync,
    *,
    clip_norm: float | None = None,
    after_phase: Callable[[Phase], None] = lambda phase: None,
    call_context: CallContext = nullcontext,
    after_sync: Callable[[], None] = lambda: None,
) -> StepResult:
    """Runs forward, backward, gradient sync, and clipping if `clip_norm` is given.

    Afterwards the parameters' gradients are ready for the optimizer.
    Called once a step by `Trainer.step`, `forward_backward` and `StandardStep.run`; on shapes by `PreparedStep.run`.
    criterion: called with the model's output and a microbatch's targets; losses, and the sums of a `LossWithParts`, are
        summed over the microbatches. Under `RouterLosses`, the microbatches' arguments include router=True.
    sync: of the model.
    clip_norm: the largest norm of the gradients; 0 computes the norm and scales nothing; None: no norm.
    after_phase: called with the phase of the collectives issued since the last call: after each forward and each
        backward of a microbatch, or under a pipeline after each action of the schedule, with "forward" or "backward";
        after the last action once more with "backward", because a pipeline may still issue collectives then; at the
        end with "gradients".
    call_context: makes the context in which the model and the criterion are called, for example autocast.
    after_sync: called once, when the parameters' gradients are complete, before clipping. `Trainer` passes
        `Recorder.add_gradients`, for digests.
    Communication, by phase:
    "forward": the plan's collectives, and the sum of the losses, which is awaited after backward;
    "backward": the plan's collectives in reverse, and full buckets of gradients;
    "gradients": the remaining buckets, gradients shared between pipeline stages, the norm, and under a pipeline the
    sum of the losses and the transfer of the sum to all stages.
    Under a pipeline, an error of the model or the criterion on any rank ends the step on all ranks: each raises.
    """
    results: list[LossWithParts] = []

    def loss_of(output: Any, microbatch: Microbatch) -> Tensor:
        with call_context():
            result = split_loss(criterion(output, microbatch.targets))
        results.append(result._replace(loss=without_graph(result.loss)))
        return result.loss

    pipeline, parameter = pipeline_of(model), next(model.parameters())
    loss_sum: LossSum | None = None
    if pipeline is not None:
        error = pipeline.find_gradients(model, microbatches, loss_of, sync.paused, call_context, after_phase)
        if error is not None:
            sync.wait()
            raise error
    for i, microbatch in enumerate(microbatches if pipeline is None else ()):
        is_last = i + 1 == len(microbatches)
        with nullcontext() if is_last else sync.paused():
            with traced("forward"):
                with call_context():
                    output = model(*microbatch.args, **microbatch.kwargs)
                loss = loss_of(output, microbatch)
                del output  # the logits are freed once the loss's backward is over
            # not awaited here: otherwise no rank would start backward before all have finished forward
            if is_last:
                loss_sum = _start_sum(results, parameter)
            after_phase("forward")
            with traced("backward"):
                loss.backward(first_gradient(loss))  # type: ignore[no-untyped-call]
        after_phase("backward")
    after_phase("backward")
    with traced("sync"):
        loss_sum = loss_sum or _start_sum(results, parameter)
        sync.wait()
        found = _StepSums.of(loss_sum.wait(), add_results(results))
        if pipeline is not None:
            pipeline.sum_shared_gradients(model)
            found = _sum_over_stages(pipeline, model, criterion, found)
    after_sync()
    norm = None
    if clip_norm is not None:
        with traced("clip"):
            norm = clip_gradients(model, clip_norm)
    after_phase("gradients")
    local_loss = loss_sum.local.sum() if exact_axes() is not None else loss_sum.local
    return StepResult(found.loss, local_loss, norm, found.report, found.sums)


def _start_sum(results: list[LossWithParts], parameter: Tensor) -> LossSum:
    """Start the sum of the losses and of their parts over the ranks. results: of this rank's microbatches."""
    losses = [each.loss for each in results]
    return LossSum(losses, parameter.device, parameter.dtype, add_results(results).addends)


class _StepSums(NamedTuple):
    """A step's loss and the parts of the loss, summed over microbatches and ranks. Made by `find_gradients`."""

    loss: Tensor  # scalar; no number on a rank outside the mesh
    sums: Tensor | None  # [n]: of `LossWithParts.sums`
    routers: Tensor | None  # [1 + layers with experts]: the balance loss, then each layer's z-loss; no coefficients
    load: Tensor | None  # [layers with experts, E]: the tokens given to each expert

    @classmethod
    def of(cls, values: Tensor, parts: StepParts) -> _StepSums:
        """Cuts the sums over ranks into the loss and the parts.

        values: the result of `LossSum.wait`: [1 + n + 1 + layers], the loss, then `StepParts.addends`. A scalar without
            parts. Without numbers on a rank outside the mesh.
        parts: of this rank. The lengths tell where to cut. `load` is taken as is, since the criterion has summed the
            load over the ranks.
        """
        if not values.ndim or not values.numel():  # a scalar without parts, or no number outside the mesh
            return cls(values, None, None, None)
        n = 0 if parts.sums is None else len(parts.sums)
        load = None if parts.routers is None else parts.routers.load
        return cls(
            values[0],
            None if parts.sums is None else values[1 : 1 + n],
            None if load is None else values[1 + n :],
            load,
        )

    @property
    def report(self) -> RouterReport | None:
        """The routers' parts, for `StepResult.parts`; None without `RouterLosses`."""
        if self.routers is None or self.load is None:
            return None
        return RouterReport(balance=self.routers[0], z=self.routers[1:], load=self.load)


def _sum_over_stages(pipeline: Pipeline, model: nn.Module, criterion: Criterion, found: _StepSums) -> _StepSums:
    """The last stage's `found`, on the ranks of all stages.

    Communication: an all-reduce over "pp". Earlier stages know the number of sums from the criterion, and the load's
    shape from the model's config; under a config without experts there is no load.
    """
    loss, config, n = found.loss, getattr(model, "config", None), num_sums_of(criterion)
    shapes: list[tuple[int, ...]] = [(n,), (0,), (0,)]
    if isinstance(criterion, RouterLosses) and isinstance(config, MixtureConfig):
        layers = len(config.sparse_layers)
        shapes[1:] = [(1 + layers,), (layers, config.num_experts)]
    sizes = [math.prod(shape) for shape in shapes]
    if not sum(sizes):
        return _StepSums(pipeline.sum_over_stages(loss), None, None, None)
    parts = [
        loss.new_zeros(size) if part is None else part.flatten().to(loss.dtype)[:size]
        for part, size in zip(found[1:], sizes, strict=True)
    ]
    values = pipeline.sum_over_stages(torch.cat([loss[None], *parts]))
    split = torch.split(values[1:], sizes)
    whole = [part.view(shape) if size else None for part, shape, size in zip(split, shapes, sizes, strict=True)]
    return _StepSums(values[0], *whole)


@with_fixed_parameters
@with_exact_sums
def find_loss(
    model: nn.Module, criterion: Criterion, microbatches: Sequence[Microbatch], call_context: CallContext = nullcontext
) -> Tensor:
    """The sum of the microbatches' losses, a scalar on every rank, without gradients.

    Called by `Trainer.held_out_loss`, and for step 1 by `Trainer` on rank 0 alone, with the whole model, to compare
    the loss with the loss on the mesh.
    Communication: the model's forward and one sum of the losses; with stages also the messages between stages and a
    second sum, over "pp".
    """

    def loss_of(output: Any, microbatch: Microbatch) -> Tensor:
        return split_loss(criterion(output, microbatch.targets)).loss

    pipeline, parameter = pipeline_of(model), next(model.parameters())
    with torch.no_grad(), call_context():
        if pipeline is None:
            losses = [loss_of(model(*each.args, **each.kwargs), each) for each in microbatches]
        else:
            losses = pipeline.evaluate(model, microbatches, loss_of)
        total = LossSum(losses, parameter.device, parameter.dtype).wait()
        return total if pipeline is None else pipeline.sum_over_stages(total)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients to a norm of at most `max_norm` over the whole model; return the norm before scaling.

    Called by `find_gradients`. In a training loop of your own, call this function between `forward_backward` and
    `optimizer.step()`.
    max_norm: 0 means no scaling, as in Megatron, nanoGPT and transformers.
    The norm is a scalar. Communication and errors: as `clip_grad_norm_`.
    Under pipeline parallelism each rank passes the parameters of the local stages, also frozen ones: stages without
    trained parameters take part in the sum. A parameter shared by several stages counts on the first stage only.
    """
    max_norm = max_norm or math.inf
    pipeline = pipeline_of(model)
    if pipeline is None:
        return clip_grad_norm_([each for each in model.parameters() if each.requires_grad], max_norm)
    copies = [parameter for name, parameter in model.named_parameters() if not pipeline.is_counted_here(name)]
    return clip_grad_norm_(model.parameters(), max_norm, mesh=pipeline.mesh, copies=copies)
