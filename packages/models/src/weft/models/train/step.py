"""The part of a training step that communicates: it is run when training, and on shapes when what it communicates is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.reshard import GradientSync, reshard

from ..communication import Phase
from .optimizer import clip_gradients


@dataclass(frozen=True, slots=True)
class Found:
    """What a step found, on the device. loss: whole, on every rank. local_loss: this rank's part. grad_norm: None unasked."""

    loss: Tensor
    local_loss: Tensor
    grad_norm: Tensor | None


def find_gradients(
    model: nn.Module,
    compute_loss: Callable[[], Tensor],
    sync: GradientSync,
    *,
    clip_norm: float | None = None,
    ended: Callable[[Phase], None] = lambda phase: None,
) -> Found:
    """Forward, backward, gradient sync, and clipping where a `clip_norm` is given: the parameters' gradients are ready.

    compute_loss: the criterion of the model's output, of plain or laid out tokens. ended: called as each phase ends.
    Communication: in "forward" what the plan says and the sum of the loss; in "backward" the plan's duals and the buckets of
    gradients that are full; in "gradients" the other buckets, and the norm's one number.
    """
    loss = compute_loss()
    local_loss = loss.detach()
    loss = whole_loss(loss)
    ended("forward")
    loss.backward()  # type: ignore[no-untyped-call]
    ended("backward")
    sync.wait()
    norm = None if clip_norm is None else clip_gradients(model, clip_norm)
    ended("gradients")
    return Found(local_value(loss), local_value(local_loss), norm)


def whole_loss(loss: Tensor) -> Tensor:
    """The loss of all ranks, on every rank, from this rank's part. Communication: the sum, over the axes that shard the tokens."""
    return reshard(loss) if isinstance(loss, DTensor) else loss


def local_value(scalar: Tensor) -> Tensor:
    """A number as a plain tensor: this rank's."""
    scalar = scalar.detach()
    return scalar.to_local() if isinstance(scalar, DTensor) else scalar
