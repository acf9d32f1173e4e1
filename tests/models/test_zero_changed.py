"""Sharded optimizers: a forward computes with the parameters' values, however a program changed them.

A forward gathers no more than these values need.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh
from weft.models import forward_backward, generate, parallelize
from weft.reshard import GradientSync, distribute, fixed_parameters, layout_of, reshard

from tests.models.cases import whole
from tests.models.test_zero import CONFIG, LEVELS, batch, make
from tests.support.collectives import Collectives

MESH = {"dp": 2}
FACTOR = 1.5


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def by_foreach(model: nn.Module) -> None:
    torch._foreach_mul_(list(model.parameters()), FACTOR)


def by_foreach_on_local_tensors(model: nn.Module) -> None:
    torch._foreach_mul_([local(each) for each in model.parameters()], FACTOR)


def each(change: Callable[[Tensor], Any]) -> Callable[[nn.Module], None]:
    def changed(model: nn.Module) -> None:
        for parameter in model.parameters():
            change(parameter)

    return changed


def by_numpy(parameter: Tensor) -> None:
    local(parameter).detach().numpy()[...] *= FACTOR


def by_loading(model: nn.Module) -> None:
    model.load_state_dict({name: value * FACTOR for name, value in model.state_dict().items()})


def by_copying(model: nn.Module) -> None:
    scaled = copy.deepcopy(model)
    by_foreach(scaled)
    for parameter, value in zip(model.parameters(), scaled.parameters(), strict=True):
        parameter.data.copy_(value.data)


class Scaling:
    """A foreign optimizer, which writes through `.data`."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.data.add_(parameter.data, alpha=FACTOR - 1)


def in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.mul_(FACTOR)


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "in-place": each(lambda parameter: parameter.mul_(FACTOR)),
    "data": each(lambda parameter: parameter.data.mul_(FACTOR)),
    "detached": each(lambda parameter: parameter.detach().mul_(FACTOR)),
    "view": each(lambda parameter: parameter.view(-1).mul_(FACTOR)),
    "local": each(lambda parameter: local(parameter).mul_(FACTOR)),
    "local-view": each(lambda parameter: local(parameter).data.view(-1)[:].mul_(FACTOR)),
    "foreach": by_foreach,
    "foreach-local": by_foreach_on_local_tensors,
    "numpy": each(by_numpy),
    "loaded": by_loading,
    "copied": by_copying,
    "inference-mode": in_inference_mode,
    "optimizer-of-ones-own": lambda model: Scaling(model.parameters()).step(),
    "nothing": lambda model: None,
}


def loss_of(model: nn.Module, mesh: ProcessMesh | None, seed: int) -> Tensor:
    tokens, targets = (part[:4].contiguous() for part in batch(seed))
    if mesh is None:
        return cross_entropy(model(tokens), targets)
    rows = Layout(mesh, "dp: S(0)")
    return reshard(cross_entropy(model(distribute(tokens, rows)), distribute(targets, rows)))


def made(zero: int | None) -> tuple[nn.Module, ProcessMesh | None]:
    """A model sharded on two ranks; on one process where zero is None."""
    model, mesh = make(), None if zero is None else ProcessMesh.grid(**MESH)
    if mesh is not None:
        parallelize(model, mesh, replace(model.parallel_plan(), zero=zero))
    return model, mesh


def logits_of(model: nn.Module, mesh: ProcessMesh | None) -> Tensor:
    tokens = batch(0)[0][:4].contiguous()
    return whole(model(tokens if mesh is None else distribute(tokens, Layout(mesh, "dp: S(0)"))))


def after_changes(zero: int | None) -> dict[str, list[Tensor]]:
    """By way of change: outputs before a change and after each of two, in three modes; then the head's gradient."""
    found: dict[str, list[Tensor]] = {}
    for name, change in WAYS.items():
        model, mesh = made(zero)
        sync = GradientSync(model)
        modes: list[Callable[[], AbstractContextManager[Any]]] = [torch.no_grad, torch.inference_mode, nullcontext]
        found[name] = []
        for mode in modes:
            with mode():
                found[name].append(logits_of(model, mesh).detach().clone())
            with torch.no_grad():
                change(model)
        loss_of(model, mesh, 0).backward()
        sync.wait()
        found[name].append(whole(model.get_parameter("lm_head.weight").grad))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", LEVELS)
def test_a_forward_pass_computes_with_what_the_parameters_are(zero: int, pool: Any) -> None:
    truth = after_changes(None)
    for found in pool.run(after_changes, zero, ranks=2):
        for name, values in truth.items():
            for value, right in zip(found[name], values, strict=True):
                torch.testing.assert_close(
                    value, right, rtol=1e-4, atol=1e-5 * float(right.abs().max()), msg=lambda m, n=name: f"{n}: {m}"
                )


def on_one_rank(zero: int) -> None:
    """The shards of a single rank change, unseen by the rest: all ranks gather again."""
    mesh, model, alone = ProcessMesh.grid(**MESH), make(), make()
    parallelize(model, mesh, replace(model.parallel_plan(), zero=zero))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(logits_of(model, mesh), logits_of(alone, None), rtol=1e-4, atol=1e-5)
            for parameter, full in zip(model.parameters(), alone.parameters(), strict=True):
                if dist.get_rank() == 1:
                    by_numpy(parameter)
                full[layout_of(parameter).local_slices(parameter.shape, 1)] *= FACTOR


@pytest.mark.parametrize("zero", LEVELS[1:])
def test_a_parameter_changed_on_one_rank_changes_on_all(zero: int, pool: Any) -> None:
    pool.run(on_one_rank, zero, ranks=2)


def averaged(zero: int | None) -> list[float]:
    """The losses of an average of a model's weights, after each step."""
    model, mesh = made(zero)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    sync, optimizer = GradientSync(model), torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(4):
        losses += [loss_of(one, mesh, step).item() for one in (model, average)]
        loss_of(model, mesh, step).backward()
        sync.wait()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return losses


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", LEVELS)
def test_an_average_of_weights_is_that_of_one_process(zero: int, pool: Any) -> None:
    truth = averaged(None)
    assert len(set(truth)) > 5
    for found in pool.run(averaged, zero, ranks=2):
        assert found == pytest.approx(truth, rel=1e-5)


def two_passes_at_once(zero: int | None) -> Tensor:
    """Two forward passes, then their backward passes: the second gathers again while the first's values are kept."""
    model, mesh = made(zero)
    sync = GradientSync(model)
    first, second = (loss_of(model, mesh, seed) for seed in (0, 1))
    (first + second).backward()
    sync.wait()
    return whole(model.get_parameter("layers.0.mlp.up_proj.weight").grad)


@pytest.mark.parametrize("zero", LEVELS)
def test_passes_that_are_under_way_at_once(zero: int, pool: Any) -> None:
    truth = two_passes_at_once(None)
    for found in pool.run(two_passes_at_once, zero, ranks=2):
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)


def changed_in_place_before_backward(zero: int) -> None:
    """A tensor saved by autograd was changed: backward raises, as on one process."""
    mesh, model = ProcessMesh.grid(**MESH), make()
    parallelize(model, mesh, replace(model.parallel_plan(), zero=zero))
    tokens = distribute(batch(0)[0][:4].contiguous(), Layout(mesh, "dp: S(0)"))
    loss = reshard(model(tokens).square().sum())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    model(tokens)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("zero", [1, 2])
def test_a_change_before_backward_is_an_error(zero: int, pool: Any) -> None:
    pool.run(changed_in_place_before_backward, zero, ranks=2)


def gathers_of(action: Callable[[], Any]) -> int:
    with Collectives() as seen:
        action()
    return seen.kinds.count("all-gather")


def counted(zero: int) -> dict[str, int]:
    """How often the parameters of blocks, and the rest, are gathered."""
    mesh, model = ProcessMesh.grid(**MESH), make()
    plan = replace(model.parallel_plan(), zero=zero)
    parallelize(model, mesh, plan)
    tokens, targets = (each[:4].contiguous() for each in batch(0))
    laid = [distribute(each, Layout(mesh, "dp: S(0)")) for each in (tokens, targets)]
    sync = GradientSync(model)
    criterion = partial(cross_entropy)

    def passes(count: int) -> None:
        for _ in range(count):
            model(laid[0])

    def accumulated() -> None:
        for number in range(3):
            with sync.paused() if number < 2 else nullcontext():
                reshard(criterion(model(laid[0]), laid[1])).backward()
        sync.wait()

    def fixed() -> None:
        with fixed_parameters(model):
            passes(3)

    with torch.no_grad():
        found = {"one pass": gathers_of(lambda: passes(1)), "three passes": gathers_of(lambda: passes(3))}
        found["three passes of fixed parameters"] = gathers_of(fixed)
        found["generating"] = gathers_of(lambda: generate(model, tokens[:, :3], max_new_tokens=4))
    found["accumulated"] = gathers_of(accumulated)
    found["a pass after"] = gathers_of(lambda: passes(1))
    sync.close()
    found["microbatches"] = gathers_of(lambda: forward_backward(model, criterion, tokens, targets, microbatches=2))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [1, 2])
def test_parameters_known_not_to_change_are_gathered_once(zero: int, pool: Any) -> None:
    for found in pool.run(counted, zero, ranks=2):
        units = found.pop("one pass")
        assert units == CONFIG.num_layers + 3  # the blocks, the embedding, the last norm, the head
        assert found.pop("three passes") == 3 * units
        assert set(found.values()) == {units}, found


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "local": local,
    "detached": lambda parameter: parameter.detach(),
    "flat": lambda parameter: local(parameter).detach().view(-1),
    "numpy": lambda parameter: local(parameter).detach().numpy(),
}


def through_views(zero: int) -> None:
    """Views taken before the first pass, as an optimizer with flat memory keeps, stay views of the parameters."""
    for name, hold in HOLDERS.items():
        model, mesh = made(zero)
        alone = make()
        views = [hold(parameter) for parameter in model.parameters()]
        for _ in range(3):
            with torch.no_grad():
                torch.testing.assert_close(
                    logits_of(model, mesh), logits_of(alone, None), rtol=1e-4, atol=1e-4, msg=name
                )
                for view in views:
                    view *= FACTOR
                by_foreach(alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", LEVELS)
def test_views_from_before_the_first_pass_are_views_still(zero: int, pool: Any) -> None:
    pool.run(through_views, zero, ranks=2)


def after_other_backward_passes(zero: int) -> None:
    """Backward passes for an input's gradient alone, and passes that fail, leave the shards in place."""
    model, mesh = made(zero)
    shards = list(model.parameters())
    norm, layer = model.norm, model.layers[0]
    rows = Layout(mesh, "dp: S(0)")
    hidden = distribute(torch.randn(4, 9, CONFIG.hidden_size), rows).requires_grad_()
    (grad,) = torch.autograd.grad(norm(hidden).sum(), hidden)
    assert all(one is other for one, other in zip(model.parameters(), shards, strict=True))
    assert grad.shape == hidden.shape

    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    handle = layer.mlp.down_proj.register_full_backward_pre_hook(lambda *_: fail(hidden))
    with pytest.raises(ArithmeticError):
        loss_of(model, mesh, 0).backward()
    handle.remove()
    alone = make()
    with torch.no_grad():
        logits_of(model, mesh)
        assert all(one is other for one, other in zip(model.parameters(), shards, strict=True))
        for each_model in (model, alone):
            by_foreach(each_model)
        torch.testing.assert_close(logits_of(model, mesh), logits_of(alone, None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("zero", LEVELS[1:])
def test_backward_passes_that_end_otherwise(zero: int, pool: Any) -> None:
    pool.run(after_other_backward_passes, zero, ranks=2)
