"""The part of a training step that communicates: it is run when training, and on shapes when what it communicates is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.reshard import GradientSync, reshard

from ..communication import Phase
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
    Communication: in "forward" what the plan says and the sum of the loss; in "backward" the plan's duals and the buckets of
    gradients that are full; in "gradients" the other buckets, those of parameters that stages share, the loss, which other
    stages do not have, and the norm's one number.
    """
    local_losses: list[Tensor] = []

    def loss_of(output: Any, microbatch: Microbatch) -> Tensor:
        with computing():
            loss = criterion(output, microbatch.targets)
        local_losses.append(local_value(loss))
        return whole_loss(loss)

    pipeline = pipeline_of(model)
    losses: list[Tensor] = []
    if pipeline is not None:
        losses = pipeline.find_gradients(model, microbatches, loss_of, sync.paused, computing, ended)
    for i, microbatch in enumerate(microbatches if pipeline is None else ()):
        with sync.paused() if i + 1 < len(microbatches) else nullcontext():
            with traced("forward"):
                with computing():
                    output = model(*microbatch.args, **microbatch.kwargs)
                loss = loss_of(output, microbatch)
            losses.append(loss.detach())
            ended("forward")
            with traced("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
        ended("backward")
    ended("backward")
    with traced("sync"):
        sync.wait()
        total, local = _total(losses, model), _total(local_losses, model)
        if pipeline is not None:
            pipeline.add_shared(model)
            total = pipeline.sum_over_stages(total)
    norm = None
    if clip_norm is not None:
        with traced("clip"):
            norm = clip_gradients(model, clip_norm)
    ended("gradients")
    return Found(total, local, norm)


def find_loss(
    model: nn.Module, criterion: Criterion, microbatches: Sequence[Microbatch], computing: Computing = nullcontext
) -> Tensor:
    """The sum of the microbatches' losses, on every rank, without gradients.

    Communication: the model's forward, the sum of the losses, and what goes from stage to stage.
    """
    pipeline = pipeline_of(model)
    with torch.no_grad(), computing():
        if pipeline is None:
            outputs = [model(*each.args, **each.kwargs) for each in microbatches]
        else:
            outputs = pipeline.forward(model, microbatches)
        pairs = zip(outputs, microbatches, strict=bool(outputs))
        total = _total([whole_loss(criterion(output, each.targets)) for output, each in pairs], model)
        return total if pipeline is None else pipeline.sum_over_stages(total)


def _total(losses: Sequence[Tensor], model: nn.Module) -> Tensor:
    if not losses:  # on a stage that is not the last
        return torch.zeros((), device=next(model.parameters()).device)
    return torch.stack([local_value(loss) for loss in losses]).sum() if len(losses) > 1 else local_value(losses[0])


def whole_loss(loss: Tensor) -> Tensor:
    """The loss of all ranks, on every rank, from this rank's part. Communication: the sum, over the axes that shard the tokens."""
    return reshard(loss) if isinstance(loss, DTensor) else loss


def local_value(scalar: Tensor) -> Tensor:
    """A number as a plain tensor: this rank's."""
    scalar = scalar.detach()
    return scalar.to_local() if isinstance(scalar, DTensor) else scalar
