"""The losses of microbatches add up to the criterion's loss of the whole batch, whatever its divisor, on every mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh
from weft.models import PipelinePlan, forward_backward, parallelize
from weft.reshard import distribute

from tests.models.cases import SMALL, gradients_of, gradients_off, make, some_tokens, whole
from tests.support.pool import Pool

V = SMALL.vocab_size
WEIGHT = torch.linspace(0.1, 3, V)
Criterion = Callable[..., Tensor]


def torchs(output: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), **options)


def masked(output: Tensor, targets: Tensor) -> Tensor:
    """A mean of our own making, whose gradient is NaN where nothing is counted."""
    counts = (targets != -100).float()
    losses = torchs(output, targets, reduction="none").view_as(counts)
    return (losses * counts).sum() / counts.sum()


def at_least_one(output: Tensor, targets: Tensor) -> Tensor:
    return torchs(output, targets, reduction="sum") / (targets != -100).sum().clamp(min=1)


def weight_and_z_loss(output: Tensor, targets: Tensor, denominator: Any = None) -> Tensor:
    """The meaning of cross_entropy's two options, by torch."""
    logits, counts = output.flatten(0, 1), (targets.flatten() != -100).float()
    z_loss = 0.1 * (logits.logsumexp(-1).square() * counts).sum() / counts.sum()
    return F.cross_entropy(logits, targets.flatten(), weight=WEIGHT) + z_loss


# The criterion, and its meaning on one process.
TOLD: dict[str, tuple[Criterion, Criterion]] = {
    "weft": (cross_entropy, torchs),
    "weft-weight": (partial(cross_entropy, weight=WEIGHT), partial(torchs, weight=WEIGHT)),
    "weft-weight-and-z-loss": (partial(cross_entropy, weight=WEIGHT, z_loss=0.1), weight_and_z_loss),
    "weft-in-a-function": (lambda o, t: cross_entropy(o, t) * 2, lambda o, t: torchs(o, t) * 2),
    "torch": (torchs, torchs),
    "torch-weight-bound": (partial(torchs, weight=WEIGHT), partial(torchs, weight=WEIGHT)),
    "torch-weight-inside": (lambda o, t: torchs(o, t, weight=WEIGHT),) * 2,
    "torch-other-ignored-class": (lambda o, t: torchs(o, t.clamp(min=0), ignore_index=0),) * 2,
    "torch-smoothing": (lambda o, t: torchs(o, t, label_smoothing=0.1),) * 2,
    "torch-sum": (lambda o, t: torchs(o, t, reduction="sum"),) * 2,
    "masked": (masked, masked),
    "at-least-one": (at_least_one, at_least_one),
    "of-all-tokens": (lambda o, t: torchs(o, t, reduction="sum") / t.numel(),) * 2,
    "squares": (lambda o, t: (o - 1).square().mean(),) * 2,
}
OF_ROWS: dict[str, tuple[Criterion, Criterion]] = {
    "means-of-rows": (
        lambda o, t: torch.stack([torchs(a[None], b[None].clamp(min=0)) for a, b in zip(o, t, strict=True)]).mean(),
    )
    * 2
}
REFUSED: dict[str, Criterion] = {
    "two-denominators": lambda o, t: weight_and_z_loss(o, t),
    "not-linear": lambda o, t: torchs(o, t).exp(),
    "sum-and-constant": lambda o, t: torchs(o, t, reduction="sum") + 300,
    "across-rows": lambda o, t: torchs(o - o.mean(0, keepdim=True), t),
    "of-two-rows": lambda o, t: torchs(o[:2].reshape(2, *o.shape[1:]), t[:2]),
}


def a_batch() -> tuple[Tensor, Tensor]:
    """Four rows: in the first only the first token counts, in the second some, in the third all, in the last none."""
    tokens = some_tokens(SMALL, 4, 9)
    targets = tokens[:, 1:].clone()
    targets[0, 1:] = targets[1, 2:5] = targets[3] = -100
    return tokens[:, :-1], targets


def expected(meaning: Criterion) -> tuple[float, dict[str, Tensor]]:
    model, (tokens, targets) = make(SMALL), a_batch()
    loss = meaning(model(tokens), targets)
    loss.backward()
    return loss.item(), gradients_of(model)


def stepped(axes: dict[str, int], name: str, microbatches: int) -> tuple[float, dict[str, Tensor]]:
    """The loss that a step returns, and the whole gradients of this rank's stage."""
    model = make(SMALL)
    if axes:
        plan = replace(model.parallel_plan(), context="all_gather" if "cp" in axes else None)
        if "pp" in axes:
            plan = replace(plan, pipeline=PipelinePlan(microbatches=microbatches))
        parallelize(model, ProcessMesh.grid(**axes), plan)
    criterion = (TOLD | OF_ROWS)[name][0]
    loss = forward_backward(model, criterion, *a_batch(), microbatches=1 if "pp" in axes else microbatches)
    return loss.item(), {each: whole(p.grad) for each, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("name", TOLD | OF_ROWS)
def test_microbatches_have_the_loss_and_gradients_of_the_batch(name: str, microbatches: int) -> None:
    truth, gradients = expected((TOLD | OF_ROWS)[name][1])
    loss, found = stepped({}, name, microbatches)
    assert loss == pytest.approx(truth, rel=2e-6)
    assert not gradients_off(found, gradients)


MESHES = [
    pytest.param({"dp": 2}, 1, id="rows"),
    pytest.param({"dp": 2}, 2, id="rows-in-microbatches"),
    pytest.param({"cp": 2}, 2, id="tokens-in-microbatches"),
    pytest.param({"dp": 2, "tp": 2}, 1, id="classes"),
    pytest.param({"pp": 2}, 4, id="stages"),
    pytest.param({"pp": 2, "dp": 2}, 2, id="stages-of-rows"),
]


@pytest.mark.parametrize(("axes", "microbatches"), MESHES)
@pytest.mark.parametrize("name", TOLD)
def test_a_mesh_has_the_loss_and_gradients_of_one_process(
    name: str, axes: dict[str, int], microbatches: int, pool: Pool
) -> None:
    if "tp" in axes and name.startswith("torch-weight"):  # torch's own, of classes on several ranks
        with pytest.raises(Exception, match=r"got mixed torch.Tensor and DTensor"):
            pool.run(stepped, axes, name, microbatches, ranks=4)
        return
    truth, gradients = expected(TOLD[name][1])
    for loss, found in pool.run(stepped, axes, name, microbatches, ranks=ProcessMesh.grid(**axes).size):
        assert loss == pytest.approx(truth, rel=2e-6)
        assert not gradients_off(found, {each: gradients[each] for each in found})


@pytest.mark.parametrize("name", REFUSED)
def test_a_criterion_that_cannot_be_weighed_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"2 microbatches.*parameter `denominator`"):
        forward_backward(make(SMALL), REFUSED[name], *a_batch(), microbatches=2)


def refused_on(axes: dict[str, int]) -> str:
    model = make(SMALL)
    plan = replace(model.parallel_plan(), pipeline=PipelinePlan(microbatches=2) if "pp" in axes else None)
    parallelize(model, ProcessMesh.grid(**axes), plan)
    try:
        forward_backward(model, REFUSED["two-denominators"], *a_batch(), microbatches=2)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_every_rank_and_stage_refuses(axes: dict[str, int], pool: Pool) -> None:
    assert all(
        "parameter `denominator`" in error for error in pool.run(refused_on, axes, ranks=math.prod(axes.values()))
    )


def weights_on_a_mesh() -> list[float]:
    found = []
    for spec in ("", "tp: S(0)"):
        model, mesh = make(SMALL), ProcessMesh.grid(tp=2)
        parallelize(model, mesh)
        weight = distribute(WEIGHT, Layout(mesh, spec))
        criterion = partial(cross_entropy, weight=weight, z_loss=0.1)
        try:
            found.append(forward_backward(model, criterion, *a_batch(), microbatches=2).item())
        except ValueError:
            found.append(-1.0)
    return found


def test_weights_may_be_a_dtensor(pool: Pool) -> None:
    truth, _ = expected(weight_and_z_loss)
    for replicated, sharded in pool.run(weights_on_a_mesh, ranks=2):
        assert replicated == pytest.approx(truth, rel=2e-6)
        assert sharded == -1.0  # as with one microbatch


def test_small_targets_and_an_ignored_number_that_is_no_class() -> None:
    tokens, targets = a_batch()
    small = targets.masked_fill(targets == -100, 255).to(torch.uint8)
    criterion = partial(cross_entropy, weight=WEIGHT, ignore_index=255)
    found = forward_backward(make(SMALL), criterion, tokens, small, microbatches=2)
    assert found.item() == pytest.approx(expected(partial(torchs, weight=WEIGHT))[0], rel=2e-6)


def test_a_batch_without_targets_is_as_one_microbatch_says() -> None:
    tokens, targets = a_batch()
    nothing = torch.full_like(targets, -100)
    assert forward_backward(make(SMALL), masked, tokens, nothing, microbatches=2).isnan()
    assert forward_backward(make(SMALL), TOLD["torch-sum"][0], tokens, nothing, microbatches=2) == 0
