"""Calls of torch in a program's training loop, on a parallel model: the numbers of a single process, or a refusal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import PipelinePlan, clip_gradients, forward_backward, parallelize
from weft.models.schedules.schedule import ScheduleName
from weft.reshard import clip_grad_norm_

from tests.models.cases import whole
from tests.models.test_pipeline import batch, make
from tests.models.test_pipeline_failures import raised
from tests.support.pool import Pool

LR = 0.05
FACTOR = 0.5
MESHES: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2-pp2": {"dp": 2, "pp": 2},
}


def laid_out(
    axes: dict[str, int], model: nn.Module, zero: int = 0, schedule: ScheduleName = "1f1b", microbatches: int = 4
) -> nn.Module:
    """The model laid out on a mesh of all ranks; without axes the model as given, for a single process."""
    if not axes:
        return model
    own: Any = model
    pipeline = PipelinePlan(microbatches=microbatches, schedule=schedule) if "pp" in axes else None
    return parallelize(model, ProcessMesh.grid(**axes), replace(own.parallel_plan(), zero=zero, pipeline=pipeline))


def loss_of(model: nn.Module) -> float:
    return forward_backward(model, cross_entropy, *batch()).item()


def steps(model: nn.Module, count: int = 2) -> list[float]:
    """The losses of steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), LR), []
    for _ in range(count):
        losses.append(loss_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def size_of(axes: dict[str, int]) -> int:
    return math.prod(axes.values())


def by_lbfgs(model: nn.Module, search: str | None) -> list[float]:
    """The losses of LBFGS's closures in two steps."""
    optimizer = torch.optim.LBFGS(model.parameters(), LR, max_iter=3, line_search_fn=search)
    losses: list[float] = []

    def closure() -> float:
        optimizer.zero_grad()
        losses.append(loss_of(model))
        return losses[-1]

    for _ in range(2):
        optimizer.step(closure)
    return losses


def searched(axes: dict[str, int], zero: int, search: str | None) -> list[float]:
    return by_lbfgs(laid_out(axes, make("llama", 2).double(), zero), search)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_lbfgs_on_data_parallel_ranks_is_that_of_one_process(zero: int, search: str | None, pool: Pool) -> None:
    expected = searched({}, 0, search)
    for found in pool.run(searched, MESHES["dp2"], zero, search, ranks=2):
        assert found == pytest.approx(expected, rel=1e-9)


def refused_on_stages(axes: dict[str, int]) -> dict[str, Any]:
    """What each refused call raises, and the norm by the function that a refusal names."""
    model = laid_out(axes, make("llama"))
    before = {name: whole(each) for name, each in model.named_parameters()}
    lbfgs = raised(partial(by_lbfgs, model, None))
    changed = [name for name, each in model.named_parameters() if not torch.equal(whole(each), before[name])]
    model.zero_grad()
    loss_of(model)
    norm = raised(lambda: clip_grad_norm_(model.parameters(), 1.0))
    of_plain = by_lbfgs(nn.Sequential(Plain()), None)  # beside a model cut into stages
    return {
        "lbfgs": lbfgs,
        "changed": changed,
        "norm": norm,
        "clipped": clip_gradients(model, 1.0).item(),
        "of plain": of_plain,
    }


class Plain(nn.Module):
    """tokens [B, T] -> logits [B, T, 31], by a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 31 * 31).reshape(31, 31).double())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


@pytest.mark.parametrize("mesh", ["pp2", pytest.param("dp2-pp2", marks=pytest.mark.exhaustive)])
def test_calls_that_read_all_parameters_are_refused_on_stages(mesh: str, pool: Pool) -> None:
    alone = make("llama")
    loss_of(alone)
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item()
    of_plain = by_lbfgs(nn.Sequential(Plain()), None)
    for found in pool.run(refused_on_stages, MESHES[mesh], ranks=size_of(MESHES[mesh])):
        assert "LBFGS.step() on parameters of a model cut into pipeline stages" in found["lbfgs"]
        assert "such as AdamW" in found["lbfgs"]
        assert found["changed"] == []
        assert "call weft.models.clip_gradients(model, max_norm)" in found["norm"]
        assert found["clipped"] == pytest.approx(norm, rel=1e-5)
        assert found["of plain"] == of_plain


def changed_between_steps(change: str, schedule: ScheduleName) -> str:
    """What a step raises after the first stages are frozen, unfrozen or converted."""
    model: Any = make("llama")
    own = [*model.embed_tokens.parameters(), *model.layers[0].parameters(), *model.layers[1].parameters()]
    for each in own:
        each.requires_grad_(change != "unfrozen")
    laid_out(MESHES["pp2"], model, schedule=schedule)
    steps(model, 1)
    if change == "converted":
        model.double()
    for each in own:
        each.requires_grad_(change != "frozen")
    return raised(partial(loss_of, model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("frozen", "leave frozen parameters out of the optimizer"),
        ("unfrozen", "leave frozen parameters out of the optimizer"),
        ("converted", r"had dtypes \[torch.float32\] and then \[torch.float64\]; .* from_pretrained"),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zero_bubble", marks=pytest.mark.exhaustive)])
def test_a_stage_that_sends_in_another_form_names_the_remedy(
    change: str, message: str, schedule: ScheduleName, pool: Pool
) -> None:
    for found in pool.run(changed_between_steps, change, schedule, ranks=2):
        assert_matches(message, found)


def assert_matches(message: str, found: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(found)


def loaded(axes: dict[str, int], zero: int, family: str, assign: bool) -> list[float]:
    """Losses after a state of plain tensors was loaded: before the first step, and after steps."""
    model = laid_out(axes, make(family), zero)
    losses = []
    for _ in range(2):
        result = model.load_state_dict(scaled(family), assign=assign)
        assert not result.missing_keys
        assert not result.unexpected_keys
        losses += steps(model)
    return losses


def scaled(family: str) -> dict[str, Tensor]:
    """The state of the whole model on a single device; the values differ from `make`'s."""
    return {name: value * FACTOR for name, value in make(family).state_dict().items()}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("mesh", "zero", "family"),
    [
        ("dp2", 0, "llama"),
        ("dp2", 1, "llama"),
        ("dp2", 3, "llama"),
        ("tp2", 0, "llama"),
        ("tp2", 0, "tied"),
        ("pp2", 0, "tied"),
        ("dp2-pp2", 2, "llama"),
    ],
)
def test_a_parallel_model_loads_the_state_of_one_process(
    mesh: str, zero: int, family: str, assign: bool, pool: Pool
) -> None:
    expected = loaded({}, 0, family, assign)
    for found in pool.run(loaded, MESHES[mesh], zero, family, assign, ranks=size_of(MESHES[mesh])):
        assert found == pytest.approx(expected, rel=1e-5)


def badly_loaded(axes: dict[str, int]) -> list[str]:
    """What loading raises for a missing entry, an unknown entry, and an entry of another shape."""
    model, state = laid_out(axes, make("llama")), scaled("llama")
    norm = "layers.0.input_layernorm.weight"
    states: list[dict[str, Tensor]] = [
        {name: value for name, value in state.items() if "input_layernorm" not in name},
        state | {"layers.0.odd.weight": state[norm]},
        state | {name: value[:-1] for name, value in state.items() if "input_layernorm" in name},
    ]
    return [raised(partial(model.load_state_dict, each)) for each in states]


@pytest.mark.parametrize("mesh", ["dp2", "pp2"])
def test_a_state_of_another_model_is_an_error_of_torch(mesh: str, pool: Pool) -> None:
    for missing, unknown, shape in pool.run(badly_loaded, MESHES[mesh], ranks=2):
        assert "Missing key(s)" in missing
        assert "layers.0.odd.weight" in unknown
        assert "size mismatch" in shape


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda model: model.to(torch.float64),
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
}


def converted(zero: int) -> dict[str, Any]:
    """What conversions raise after a step; losses of conversions to the same dtype and device, or before a step."""
    model = laid_out(MESHES["dp2"], make("llama"), zero)
    found: dict[str, Any] = {"losses": steps(model, 1)}
    found |= {name: raised(partial(convert, model)) for name, convert in CONVERSIONS.items()}
    for convert in (nn.Module.cpu, nn.Module.float, lambda each: each.to("cpu", torch.float32)):
        assert convert(model) is model
    found["losses"] += steps(model, 1)
    found["losses"] += steps(laid_out(MESHES["dp2"], make("llama"), zero).double(), 2)
    return found


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_conversion_after_a_step_is_refused(zero: int, pool: Pool) -> None:
    expected = [*steps(make("llama")), *steps(make("llama").double())]
    for found in pool.run(converted, zero, ranks=2):
        assert found.pop("losses") == pytest.approx(expected, rel=1e-5)
        assert found.keys() == CONVERSIONS.keys()
        for message in found.values():
            assert_matches("Convert the model before its first step, .*torch.autocast", message)


class Wrapped(nn.Module):
    """A model, and a layer after it where `width` is not 0."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model, self.after = model, nn.Linear(width, width) if width else None

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.model(tokens)
        return output if self.after is None else self.after(output)


def wrapped(axes: dict[str, int], width: int) -> str:
    """What a step of a model around a laid-out model raises; else the loss."""
    model = Wrapped(laid_out(axes, make("llama")), width)
    return raised(partial(loss_of, model))


@pytest.mark.parametrize(
    ("mesh", "width", "message"),
    [
        (
            "dp2",
            31,
            r"'model' of this Wrapped is laid out on .*, and after.weight beside it is not: .*ParallelPlan.merge",
        ),
        (
            "tp2",
            31,
            r"'model' of this Wrapped is laid out on .*, and after.weight beside it is not: .*ParallelPlan.merge",
        ),
        ("pp2", 31, r"'model' of this Wrapped is a Llama cut into pipeline stages, .*ParallelPlan.merge"),
        ("pp2", 0, r"call forward_backward with the Llama itself"),
    ],
)
def test_a_model_around_a_parallel_model_is_refused(mesh: str, width: int, message: str, pool: Pool) -> None:
    for found in pool.run(wrapped, MESHES[mesh], width, ranks=2):
        assert_matches(message, found)


def around(axes: dict[str, int]) -> float:
    return loss_of(Wrapped(laid_out(axes, make("llama")), 0))


def test_a_wrapper_without_parameters_computes_as_the_model(pool: Pool) -> None:
    for found in pool.run(around, MESHES["dp2"], ranks=2):
        assert found == pytest.approx(around({}), rel=1e-6)


def hooked(axes: dict[str, int], schedule: ScheduleName, post: bool) -> tuple[list[float], dict[str, int]]:
    """Losses where hooks change each microbatch's gradients, or the sum so far; and each hook's calls in a step."""
    count = 4
    model = laid_out(axes, make("llama"), schedule=schedule, microbatches=count)
    calls: dict[str, int] = {}

    def hook(name: str, given: Tensor) -> Tensor | None:
        calls[name] = calls.get(name, 0) + 1
        if not post:
            return given.clamp(-1e-3, 1e-3)
        assert given.grad is not None
        given.grad.mul_(0.5)
        return None

    for name, each in model.named_parameters():
        register = each.register_post_accumulate_grad_hook if post else each.register_hook
        register(partial(hook, name))  # type: ignore[no-untyped-call]
    optimizer, losses = torch.optim.SGD(model.parameters(), 1.0), []
    for _ in range(2):
        calls.clear()
        losses.append(forward_backward(model, cross_entropy, *batch(), microbatches=count).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, calls


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize(("mesh", "schedule"), [("pp2", "1f1b"), ("pp2", "zero_bubble"), ("dp2-pp2", "zero_bubble")])
def test_gradient_hooks_of_stages_run_once_for_each_microbatch(
    mesh: str, schedule: ScheduleName, post: bool, pool: Pool
) -> None:
    losses, calls = hooked({}, schedule, post)
    for found, own_calls in pool.run(hooked, MESHES[mesh], schedule, post, ranks=size_of(MESHES[mesh])):
        assert found == pytest.approx(losses, rel=1e-5)
        assert own_calls == {name: calls[name] for name in own_calls}


def sum_over(output: Tensor, targets: Tensor, denominator: Tensor) -> Tensor:
    return cross_entropy(output, targets, reduction="sum") / denominator


def by_sum(axes: dict[str, int], microbatches: int) -> list[float]:
    """The loss of a criterion that requires its denominator, and the norm of a gradient."""
    model = laid_out(axes, make("llama"))
    loss = forward_backward(model, sum_over, *batch(), microbatches=microbatches)
    return [loss.item(), clip_gradients(model, 1.0).item()]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mesh", ["one", "dp2", "tp2", "pp2"])
def test_a_criterion_gets_a_required_denominator(mesh: str, microbatches: int, pool: Pool) -> None:
    model = make("llama")
    truth = cross_entropy(model(batch()[0]), batch()[1])
    truth.backward()
    expected = [truth.item(), clip_gradients(model, 1.0).item()]
    axes = MESHES.get(mesh, {})
    for found in pool.run(by_sum, axes, microbatches, ranks=size_of(axes)):
        assert found == pytest.approx(expected, rel=1e-5)
