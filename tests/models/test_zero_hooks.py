"""Hooks on sharded parameters: tensor hooks, on the gradient that autograd computes, and post-accumulate hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh
from weft.models import parallelize
from weft.reshard import GradientSync, distribute, reshard

from tests.models.cases import whole
from tests.models.test_zero import LEVELS, batch, make


class Model:
    """A model on two ranks at a ZeRO level; on one process where zero is None."""

    def __init__(self, zero: int | None, axes: dict[str, int] | None = None, sync: bool = True) -> None:
        self.module, self.mesh = make(), None if zero is None else ProcessMesh.grid(**(axes or {"dp": 2}))
        if self.mesh is not None:
            parallelize(self.module, self.mesh, replace(self.module.parallel_plan(), zero=zero))
        self.sync = GradientSync(self.module) if sync else None

    def backward(self, seed: int = 0) -> None:
        tokens, targets = (each[:4].contiguous() for each in batch(seed))
        if self.mesh is None:
            cross_entropy(self.module(tokens), targets).backward()
            return
        rows = Layout(self.mesh, "dp: S(0)")
        reshard(cross_entropy(self.module(distribute(tokens, rows)), distribute(targets, rows))).backward()

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else whole(p.grad) for name, p in self.module.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(parameter) for name, parameter in self.module.named_parameters()}


def assert_close(found: dict[str, Any], truth: dict[str, Any]) -> None:
    assert found.keys() == truth.keys()
    for name, right in truth.items():
        assert (found[name] is None) == (right is None), name
        if right is not None:
            torch.testing.assert_close(found[name], right, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


HOOKED = ("lm_head.weight", "layers.0.mlp.up_proj.weight", "norm.weight")


def with_hooks(zero: int | None) -> tuple[dict[str, Any], list[str]]:
    """Hooks that change a gradient, a hook that is removed again, and a hook that only records the gradient's shape."""
    model, ran = Model(zero), []

    def zeroed(grad: Tensor) -> Tensor:
        ran.append("zeroed")
        return grad * 0

    def scaled(grad: Tensor) -> Tensor:
        ran.append("scaled")
        return grad * 3

    def seen(grad: Tensor) -> None:
        ran.append(f"seen {tuple(grad.shape)}")

    head, block, norm = (model.module.get_parameter(name) for name in HOOKED)
    head.register_hook(zeroed)
    block.register_hook(scaled)
    norm.register_hook(seen)
    gone = norm.register_hook(zeroed)
    model.backward()
    if model.sync:
        model.sync.wait()
    gone.remove()
    late = block.register_hook(scaled)
    model.backward(1)
    model.sync.wait()
    late.remove()
    return model.gradients(), sorted(ran)


@pytest.mark.parametrize("zero", LEVELS)
def test_a_hook_changes_the_gradient_of_its_parameter(zero: int, pool: Any) -> None:
    gradients, ran = with_hooks(None)
    assert ran.count("scaled") == 3
    for found, theirs in pool.run(with_hooks, zero, ranks=2):
        assert theirs == ran
        assert_close(found, gradients)


def clipped_by_value(zero: int | None) -> dict[str, Any]:
    """The sum is clamped, not each rank's addend: DTensor reduces before a clamp. The gradient is whole then."""
    model = Model(zero)
    for name in HOOKED:
        model.module.get_parameter(name).register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    for seed in range(2):
        model.backward(seed)
        model.sync.wait()
    return model.gradients()


@pytest.mark.parametrize("zero", LEVELS)
def test_a_hook_that_clamps_clamps_the_sum(zero: int, pool: Any) -> None:
    truth = clipped_by_value(None)
    assert truth["lm_head.weight"].abs().max() > 1e-3
    for found in pool.run(clipped_by_value, zero, ranks=2):
        assert_close(found, truth)


def stepped_in_backward(zero: int | None, passes: int) -> tuple[dict[str, Any], int]:
    """An optimizer for each parameter, stepped by a hook as soon as the parameter has its gradient."""
    model, steps = Model(zero), []
    optimizers = {
        parameter: torch.optim.AdamW([parameter], lr=1e-2, eps=1e-5) for parameter in model.module.parameters()
    }

    def step(parameter: Tensor) -> None:
        steps.append(parameter)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    def hook() -> None:
        for parameter in model.module.parameters():
            parameter.register_post_accumulate_grad_hook(step)

    if zero is not None:
        hook()
    for number in range(2):
        for i in range(passes):
            with model.sync.paused() if i + 1 < passes else nullcontext():
                model.backward(passes * number + i)
        if zero is None:
            for parameter in model.module.parameters():
                step(parameter)
        model.sync.wait()
    assert all(parameter.grad is None for parameter in model.module.parameters())
    return model.weights(), len(steps)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("zero", "passes"),
    [
        pytest.param(1, 1, id="zero1"),
        pytest.param(1, 2, id="zero1-two-passes"),
        pytest.param(2, 1, id="zero2"),
        pytest.param(3, 1, id="zero3"),
    ],
)
def test_an_optimizer_within_hooks_trains(zero: int, passes: int, pool: Any) -> None:
    weights, count = stepped_in_backward(None, passes)
    for found, theirs in pool.run(stepped_in_backward, zero, passes, ranks=2):
        assert theirs == count
        for name, right in weights.items():
            torch.testing.assert_close(found[name], right, rtol=1e-4, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


def without_a_sync(zero: int) -> str:
    model = Model(zero, sync=False)
    model.module.get_parameter("lm_head.weight").register_post_accumulate_grad_hook(lambda parameter: None)
    try:
        model.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("zero", LEVELS[1:])
def test_a_hook_that_nothing_would_call_is_refused(zero: int, pool: Any) -> None:
    for said in pool.run(without_a_sync, zero, ranks=2):
        assert "keep a GradientSync(model)" in said
        assert "shape (31, 32)" in said


def unfrozen(zero: int | None, chosen: Callable[[str], bool], passes: int) -> list[dict[str, Any]]:
    """Gradients before and after more parameters begin to learn, with a GradientSync made while they were frozen."""
    module, mesh = make(), None if zero is None else ProcessMesh.grid(dp=2)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not chosen(name))
    model = Model.__new__(Model)
    if mesh is not None:
        parallelize(module, mesh, replace(module.parallel_plan(), zero=zero))
    model.module, model.mesh, model.sync = module, mesh, GradientSync(module)
    found = []
    for number in range(3):
        for i in range(passes):
            model.backward(passes * number + i)
        model.sync.wait()
        found.append(model.gradients())
        module.zero_grad()
        for parameter in module.parameters():
            parameter.requires_grad_(True)
    return found


CHOICES = {
    "all-but-the-head": lambda name: name != "lm_head.weight",
    "a-block": lambda name: name.startswith("layers.1"),
    "norms": lambda name: "norm" in name,
}


def each_choice(zero: int | None, passes: int) -> dict[str, list[dict[str, Any]]]:
    return {name: unfrozen(zero, chosen, passes) for name, chosen in CHOICES.items()}


@functools.cache
def choices_alone(passes: int) -> dict[str, list[dict[str, Any]]]:
    return each_choice(None, passes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("zero", LEVELS)
def test_parameters_that_learn_later_are_synchronized_too(zero: int, passes: int, pool: Any) -> None:
    for found in pool.run(each_choice, zero, passes, ranks=2):
        for name, steps in choices_alone(passes).items():
            for step, truth in zip(found[name], steps, strict=True):
                assert_close(step, truth)


def stepped_before_wait() -> list[str]:
    """A step without wait() after a parameter begins to learn: the errors of the first and the second such step."""
    model = make()
    mesh = ProcessMesh.grid(dp=2)
    head = model.get_parameter("lm_head.weight")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is not head)
    parallelize(model, mesh, model.parallel_plan())
    held = Model.__new__(Model)
    held.module, held.mesh, held.sync = model, mesh, GradientSync(model)
    head = model.get_parameter("lm_head.weight")
    head.requires_grad_(True)
    optimizer = torch.optim.SGD([head], lr=1.0)
    said = []
    for _ in range(2):
        held.backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            said.append(str(error))
        held.sync.wait()
        optimizer.step()
    return said


def test_a_step_before_wait_is_refused_there_too(pool: Any) -> None:
    for said in pool.run(stepped_before_wait, ranks=2):
        assert len(said) == 2
        assert all("lm_head.weight" in each and "call sync.wait()" in each for each in said)


def two_syncs() -> None:
    """Two GradientSyncs on parts of one model: a frozen parameter belongs to the first that finds it learning."""
    model = nn.ModuleList([make(), make()])
    mesh = ProcessMesh.grid(dp=2)
    for each in model:
        parallelize(each, mesh, each.parallel_plan())
    first, second = model
    for parameter in first.parameters():
        parameter.requires_grad_(False)
    both, one = GradientSync(model), GradientSync(first)
    for parameter in first.parameters():
        parameter.requires_grad_(True)
    rows = Layout(mesh, "dp: S(0)")
    tokens = distribute(batch(0)[0][:4].contiguous(), rows)
    loss = reshard(first(tokens).square().sum() + second(tokens).square().sum())
    loss.backward()
    both.wait()
    one.wait()
    for name, parameter in first.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), whole(second.get_parameter(name).grad))


def test_two_syncs_that_know_of_a_frozen_parameter(pool: Any) -> None:
    pool.run(two_syncs, ranks=2)
