"""The loss of a step: a rank goes back as soon as it is forward, and the sum of all ranks' losses travels meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh
from weft.models import forward_backward, parallelize
from weft.models.losses import LossSum, first_gradient
from weft.reshard import GradientSync, distribute, reshard
from weft.reshard.moving.waits import WaitTimer, measure_waits

from tests.models.cases import SMALL, gradients_off, make, some_tokens, whole
from tests.models.stepping import observed_microbatches
from tests.support.pool import Pool

IGNORED = -100
CRITERIA: dict[str, Callable[..., Tensor]] = {
    "mean": cross_entropy,
    "sum": partial(cross_entropy, reduction="sum"),
    "weights-and-z-loss": partial(cross_entropy, weight=torch.linspace(0.5, 2, SMALL.vocab_size), z_loss=0.01),
    "of-whole-losses": lambda output, targets: reshard_if(cross_entropy(output, targets)),
    "without-denominator": lambda output, targets: cross_entropy(output, targets) * 2,
}


def reshard_if(loss: Tensor) -> Tensor:
    return reshard(loss) if isinstance(loss, DTensor) else loss


def a_batch() -> tuple[Tensor, Tensor]:
    """A batch in which ranks count different numbers of targets, and one rank only a few."""
    tokens = some_tokens(SMALL, 4, 9)
    targets = tokens[:, 1:].clone()
    targets[0, 1:] = targets[1, 3:] = IGNORED
    return tokens[:, :-1], targets


def on_ranks(axes: dict[str, int]) -> Any:
    model = make(SMALL)
    return parallelize(model, ProcessMesh.grid(**axes), model.parallel_plan()) if axes else model


def stepped(axes: dict[str, int], name: str, microbatches: int) -> tuple[float, dict[str, Tensor]]:
    """The loss that a step returns, and the whole gradients."""
    model = on_ranks(axes)
    loss = forward_backward(model, CRITERIA[name], *a_batch(), microbatches=microbatches)
    return loss.item(), {each: whole(p.grad) for each, p in model.named_parameters()}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", CRITERIA)
def test_loss_and_gradients_are_those_of_one_process(name: str, microbatches: int, pool: Pool) -> None:
    truth, gradients = stepped({}, name, microbatches)
    for axes in ({"dp": 2}, {"dp": 2, "tp": 2}):
        for loss, found in pool.run(stepped, axes, name, microbatches, ranks=ProcessMesh.grid(**axes).size):
            assert loss == pytest.approx(truth, rel=1e-6)
            assert not gradients_off(found, gradients)


class Noted(WaitTimer):
    """Says when a collective is waited for."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self._events = events

    def wait(self, work: dist.Work) -> None:
        self._events.append("wait")
        super().wait(work)


def events_of_a_step() -> list[str]:
    """When the model's output is there, when its gradient is, and when something is waited for."""
    model, events = on_ranks({"dp": 2}), []

    def criterion(output: Tensor, targets: Tensor, denominator: Any = None) -> Tensor:
        events.append("forward")
        output.register_hook(lambda grad: events.append("backward"))
        return cross_entropy(output, targets, denominator=denominator)

    with measure_waits(Noted(events)):
        forward_backward(model, criterion, *a_batch())
    return events


def test_a_rank_goes_back_without_waiting_for_the_others(pool: Pool) -> None:
    """Else each step of four processes on two cores would stand still twice in its middle."""
    for events in pool.run(events_of_a_step, ranks=2):
        assert events[:2] == ["forward", "backward"]
        assert events[2:] == ["wait", "wait"]  # for the gradients' bucket, and the loss


def communication_of_microbatches() -> str:
    from weft.models.step.forward_backward import divide_batch, weight_criterion

    model, (tokens, targets) = on_ranks({"dp": 2}), a_batch()
    parts = divide_batch(model, tokens, targets, 2, {})
    _, communication = observed_microbatches(
        model, weight_criterion(cross_entropy, parts, targets), parts, GradientSync(model)
    )
    return str(communication)


def test_the_losses_of_all_microbatches_are_summed_at_once(pool: Pool) -> None:
    for found in pool.run(communication_of_microbatches, ranks=2):
        assert found.splitlines()[0].split() == ["forward", "dp", "1", "all-reduce", "4", "bytes"]


def gradient_of(placement: str) -> tuple[float, float, str]:
    """The sum and the first gradient of a scalar loss: 3 on rank 0 and 0 on rank 1, or 3 on both."""
    loss = distribute(torch.tensor(3.0), Layout(ProcessMesh.grid(dp=2), f"dp: {placement}"))
    first = first_gradient(loss)
    return LossSum([loss, loss], torch.device("cpu")).wait().item(), first.to_local().item(), str(first.placements)


@pytest.mark.parametrize("placement", ["P(sum)", "R"])
def test_a_backward_begins_with_one_on_every_rank(placement: str, pool: Pool) -> None:
    for summed, first, lies in pool.run(gradient_of, placement, ranks=2):
        assert (summed, first, lies) == (6.0, 1.0, "(Replicate(),)")


def test_a_stage_without_a_loss_has_nothing_to_add() -> None:
    total = LossSum([], torch.device("cpu"))
    assert (total.local.item(), total.wait().item()) == (0.0, 0.0)
