"""The part of a training step that communicates: it is run when training, and on shapes when what it communicates is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from weft.reshard import GradientSync
from weft.reshard.running.units import with_fixed_parameters

from ..communication import Phase
from ..losses import LossSum, first_gradient, without_graph
from ..parallel.parallelize import pipeline_of
from ..parallel.pipeline.run import Microbatch
from ..tracing import traced
from .optimizer import clip_gradients

Criterion = Callable[[Any, Any], Tensor]
Computing = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Found:
    """What a step found, on the device. loss: whole, on every rank. local_loss: this rank's part. grad_norm: None unasked."""

    loss: Tensor
    local_loss: Tensor
    grad_norm: Tensor | None


@with_fixed_parameters
def find_gradients(
    model: nn.Module,
    criterion: Criterion,
    microbatches: Sequence[Microbatch],
    sync: GradientSync,
    *,
    clip_norm: float | None = None,
    ended: Callable[[Phase], None] = lambda phase: None,
    computing: Computing = nullcontext,
) -> Found:
    """Forward, backward, gradient sync, and clipping where a `clip_norm` is given: the parameters' gradients are ready.

    criterion: of the model's output and a microbatch's targets; their losses are added up. ended: called when the forward or the
    backward of a microbatch is over, and last of all, with the phase to which what was issued since belongs. computing: what
    the model and the criterion are called in, as autocast.
    Communication: in "forward" what the plan says, and the sum of the losses, which is waited for after backward; in "backward"
    the plan's duals and the buckets of gradients that are full; in "gradients" the other buckets, those of parameters that stages
    share, the norm's one number, and the losses of a pipeline: their sum, and what brings it to the other stages.
    """
    losses: list[Tensor] = []

    def loss_of(output: Any, microbatch: Microbatch) -> Tensor:
        with computing():
            loss = criterion(output, microbatch.targets)
        losses.append(without_graph(loss))
        return loss

    pipeline, like = pipeline_of(model), next(model.parameters())
    total: LossSum | None = None
    if pipeline is not None:
        pipeline.find_gradients(model, microbatches, loss_of, sync.paused, computing, ended)
    for i, microbatch in enumerate(microbatches if pipeline is None else ()):
        is_last = i + 1 == len(microbatches)
        with nullcontext() if is_last else sync.paused():
            with traced("forward"):
                with computing():
                    output = model(*microbatch.args, **microbatch.kwargs)
                loss = loss_of(output, microbatch)
            if is_last:  # waited for at once, no rank would go back before all are forward
                total = LossSum(losses, like.device, like.dtype)
            ended("forward")
            with traced("backward"):
                loss.backward(first_gradient(loss))  # type: ignore[no-untyped-call]
        ended("backward")
    ended("backward")
    with traced("sync"):
        total = total or LossSum(losses, like.device, like.dtype)
        sync.wait()
        whole = total.wait()
        if pipeline is not None:
            pipeline.add_shared(model)
            whole = pipeline.sum_over_stages(whole)
    norm = None
    if clip_norm is not None:
        with traced("clip"):
            norm = clip_gradients(model, clip_norm)
    ended("gradients")
    return Found(whole, total.local, norm)


@with_fixed_parameters
def find_loss(
    model: nn.Module, criterion: Criterion, microbatches: Sequence[Microbatch], computing: Computing = nullcontext
) -> Tensor:
    """The sum of the microbatches' losses, on every rank, without gradients.

    Communication: the model's forward, the sum of the losses once, and what goes from stage to stage.
    """
    pipeline, like = pipeline_of(model), next(model.parameters())
    with torch.no_grad(), computing():
        if pipeline is None:
            outputs = [model(*each.args, **each.kwargs) for each in microbatches]
        else:
            outputs = pipeline.forward(model, microbatches)
        losses = [criterion(output, each.targets) for output, each in zip(outputs, microbatches, strict=bool(outputs))]
        total = LossSum(losses, like.device, like.dtype).wait()
        return total if pipeline is None else pipeline.sum_over_stages(total)
