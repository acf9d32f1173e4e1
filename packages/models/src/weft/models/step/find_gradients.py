"""The communicating part of a training step: forward, backward, gradient sync and clipping.

Training runs `find_gradients` on data; the recording behind predictions and `weft explain` runs it on shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from weft.reshard import GradientSync, clip_grad_norm_
from weft.reshard.extension import with_fixed_parameters

from ..losses import LossSum, first_gradient, without_graph
from ..mixture_config import MixtureConfig
from ..parallel.parallelize import pipeline_of
from ..parallel.pipeline.run import Microbatch, Pipeline
from ..tracing import traced
from .communication import Phase
from .criterion import Criterion
from .router import RouterLosses, RouterParts, RouterReport, add_parts, split_loss

CallContext = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of `find_gradients`: tensors on the device."""

    loss: Tensor  # scalar: the loss of the whole batch, the same on every rank
    local_loss: Tensor  # scalar: this rank's part of the loss
    grad_norm: Tensor | None  # scalar: the norm of the gradients before clipping; None without clip_norm
    parts: RouterReport | None = None  # the routers' losses, under `RouterLosses`


@with_fixed_parameters
def find_gradients(
    model: nn.Module,
    criterion: Criterion,
    microbatches: Sequence[Microbatch],
    sync: GradientSync,
    *,
    clip_norm: float | None = None,
    after_phase: Callable[[Phase], None] = lambda phase: None,
    call_context: CallContext = nullcontext,
) -> StepResult:
    """Runs forward, backward, gradient sync, and clipping if `clip_norm` is given.

    Afterwards the parameters' gradients are ready for the optimizer.
    criterion: called with the model's output and a microbatch's targets; the microbatches' losses are summed. Under
        `RouterLosses`, the microbatches call the model with router=True.
    clip_norm: 0 computes the norm and scales nothing.
    after_phase: called with the phase of the collectives issued since the last call. The calls come after each forward
        and each backward of a microbatch, or under a pipeline after each action of the schedule. One call with
        "backward" follows the last action, because a pipeline may still issue collectives then. The last call has
        "gradients".
    call_context: makes the context in which the model and the criterion are called, for example autocast.
    Communication, by phase:
    "forward": the plan's collectives, and the sum of the losses, which is awaited after backward;
    "backward": the plan's collectives in reverse, and full buckets of gradients;
    "gradients": the remaining buckets, gradients shared between pipeline stages, the norm, and under a pipeline the
    sum of the losses and the transfer of the sum to all stages.
    """
    losses: list[Tensor] = []
    parts: list[RouterParts] = []

    def loss_of(output: Any, microbatch: Microbatch) -> Tensor:
        with call_context():
            loss, of_routers = split_loss(criterion(output, microbatch.targets))
        losses.append(without_graph(loss))
        parts.extend([] if of_routers is None else [of_routers])
        return loss

    pipeline, parameter = pipeline_of(model), next(model.parameters())
    loss_sum: LossSum | None = None
    if pipeline is not None:
        pipeline.find_gradients(model, microbatches, loss_of, sync.paused, call_context, after_phase)
    for i, microbatch in enumerate(microbatches if pipeline is None else ()):
        is_last = i + 1 == len(microbatches)
        with nullcontext() if is_last else sync.paused():
            with traced("forward"):
                with call_context():
                    output = model(*microbatch.args, **microbatch.kwargs)
                loss = loss_of(output, microbatch)
            # not awaited here: otherwise no rank would start backward before all have finished forward
            if is_last:
                loss_sum = _start_sum(losses, parts, parameter)
            after_phase("forward")
            with traced("backward"):
                loss.backward(first_gradient(loss))  # type: ignore[no-untyped-call]
        after_phase("backward")
    after_phase("backward")
    with traced("sync"):
        loss_sum = loss_sum or _start_sum(losses, parts, parameter)
        sync.wait()
        sums, added = loss_sum.wait(), add_parts(parts)
        load = None if added is None else added.load
        if pipeline is not None:
            pipeline.add_shared(model)
            sums, load = _sum_over_stages(pipeline, model, criterion, sums, load)
    report = None if load is None else RouterReport(balance=sums[1], z=sums[2:], load=load)
    norm = None
    if clip_norm is not None:
        with traced("clip"):
            norm = clip_gradients(model, clip_norm)
    after_phase("gradients")
    total = sums[0] if sums.ndim and sums.numel() else sums  # no number on a rank outside the mesh
    return StepResult(total, loss_sum.local, norm, report)


def _start_sum(losses: list[Tensor], parts: list[RouterParts], parameter: Tensor) -> LossSum:
    """Start the sum of the losses, and of the routers' parts, over the ranks."""
    added = add_parts(parts)
    return LossSum(losses, parameter.device, parameter.dtype, None if added is None else added.addends)


def _sum_over_stages(
    pipeline: Pipeline, model: nn.Module, criterion: Criterion, sums: Tensor, load: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The last stage's sums, and load of experts, on the ranks of all stages.

    Communication: an all-reduce over "pp". The other stages know the load's shape from the model's config; under a
    config without experts, the loss alone is summed and the load is None.
    """
    config = getattr(model, "config", None)
    if not isinstance(criterion, RouterLosses) or not isinstance(config, MixtureConfig):
        return pipeline.sum_over_stages(sums[0] if sums.ndim else sums), None
    layers, E = len(config.sparse_layers), config.num_experts
    if load is None:
        sums, load = torch.cat([sums[None], sums.new_zeros(1 + layers)]), sums.new_zeros(layers, E)
    values = pipeline.sum_over_stages(torch.cat([sums, load.flatten().to(sums.dtype)]))
    return values[: 2 + layers], values[2 + layers :].view(layers, E)


@with_fixed_parameters
def find_loss(
    model: nn.Module, criterion: Criterion, microbatches: Sequence[Microbatch], call_context: CallContext = nullcontext
) -> Tensor:
    """The sum of the microbatches' losses, on every rank, without gradients: for held-out text, and to compare losses.

    Communication: the model's forward and one sum of the losses; with stages also the messages between stages and a
    second sum, over "pp".
    """
    pipeline, parameter = pipeline_of(model), next(model.parameters())
    with torch.no_grad(), call_context():
        if pipeline is None:
            outputs = [model(*each.args, **each.kwargs) for each in microbatches]
        else:
            outputs = pipeline.forward(model, microbatches)
        pairs = zip(outputs, microbatches, strict=bool(outputs))  # only ranks of the last stage have outputs
        losses = [split_loss(criterion(output, microbatch.targets))[0] for output, microbatch in pairs]
        total = LossSum(losses, parameter.device, parameter.dtype).wait()
        return total if pipeline is None else pipeline.sum_over_stages(total)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients to a norm of at most `max_norm` over the whole model; return the norm before scaling.

    max_norm: 0 means no scaling, as in Megatron, nanoGPT and transformers.
    The norm is a scalar. Communication and errors: as `clip_grad_norm_`, called with all parameters requiring
    gradients.
    Under pipeline parallelism each rank passes the parameters of the local stages; a parameter shared by several
    stages counts on the first stage only.
    """
    max_norm = max_norm or math.inf
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    pipeline = pipeline_of(model)
    if pipeline is None:
        return clip_grad_norm_(trained.values(), max_norm)
    copies = [parameter for name, parameter in trained.items() if not pipeline.is_counted_here(name)]
    return clip_grad_norm_(trained.values(), max_norm, mesh=pipeline.mesh, copies=copies)
