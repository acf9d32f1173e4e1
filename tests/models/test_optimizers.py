"""The optimizers by name, the parameters that decay, and the learning rate over the steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models import (
    GPT,
    GPTConfig,
    Llama,
    LlamaConfig,
    forward_backward,
    initialize,
    load_checkpoint,
    parallelize,
    save_checkpoint,
)
from weft.models.train.config import NOT_ELEMENTWISE, OPTIMIZERS, OptimizerConfig, learning_rate
from weft.models.train.optimizer import make_optimizer
from weft.reshard import distribute, layout_of, to_global

from tests.models.cases import SMALL, some_tokens
from tests.support.pool import Pool

ONE_LAYER = {"vocab_size": 7, "hidden_size": 8, "num_layers": 1, "num_heads": 2}  # of which some sizes are odd


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"schedule": "constant"}, [0.5, 1.0, *[1.0] * 8], id="constant"),
        pytest.param(
            {"schedule": "linear"}, [0.5, 1, 1, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125], id="linear"
        ),
        pytest.param({"schedule": "wsd"}, [0.5, *[1.0] * 8, 0.55], id="wsd-a-fifth"),
        pytest.param({"schedule": "wsd", "decay_steps": 4}, [0.5, *[1.0] * 6, 0.775, 0.55, 0.325], id="wsd-four"),
        pytest.param({"schedule": "wsd", "decay_steps": 0}, [0.5, *[1.0] * 9], id="wsd-none"),
        pytest.param(
            {"schedule": "linear", "final_share": 0.0, "warmup_steps": 0}, [1 - i / 10 for i in range(10)], id="to-zero"
        ),
    ],
)  # fmt: skip
def test_the_rate_over_ten_steps(options: dict[str, object], expected: list[float]) -> None:
    config = OptimizerConfig(**{"lr": 1.0, "warmup_steps": 2, **options})  # type: ignore[arg-type]
    assert [learning_rate(config, step, 10) for step in range(10)] == pytest.approx(expected)


def test_a_cosine_is_half_way_down_in_the_middle() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=0, final_share=0.2)
    assert learning_rate(config, 50, 100) == pytest.approx(0.6)


def test_decay_steps_are_of_one_schedule() -> None:
    with pytest.raises(
        ValueError, match=r"decay_steps is 5, but only the schedule wsd has decay steps; optimizer\.schedule is cosine"
    ):
        OptimizerConfig(decay_steps=5)


def stepped(name: str, mesh: ProcessMesh | None, zero: int = 0) -> list[Tensor]:
    """The weights after three updates."""
    model = Llama(SMALL)
    initialize(model, seed=0)
    tokens = some_tokens(SMALL, 4, 9)
    inputs, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if mesh is not None:
        parallelize(model, mesh, replace(model.parallel_plan(), zero=zero))
        inputs, target = (distribute(each, Layout(mesh, {"dp": Shard(0)})) for each in (inputs, target))
    optimizer = make_optimizer(model, OptimizerConfig(name=name, lr=1e-2))
    for _ in range(3):
        forward_backward(model, cross_entropy, inputs, target)
        optimizer.step()
        optimizer.zero_grad()
    return [whole(parameter) for parameter in model.parameters()]


def differences(names: list[str], zero: int) -> list[float]:
    """By optimizer, the largest distance from one process's weights, relative to the length of the update."""
    mesh = ProcessMesh.grid(dp=2, tp=2)
    initial = Llama(SMALL)
    initialize(initial, seed=0)
    found = []
    for name in names:
        pairs = zip(stepped(name, mesh, zero), stepped(name, None), initial.parameters(), strict=True)
        found.append(max(float((ours - alone).norm() / (alone - start).norm()) for ours, alone, start in pairs))
    return found


def with_others(*few: str) -> list[Any]:
    """Two cases: the named elementwise optimizers, and the rest of these. Muon has tests of its own: test_muon.py."""
    others = [name for name in OPTIMIZERS if name not in (*few, "muon")]
    return [pytest.param(list(few), id="-".join(few)), pytest.param(others, id="others", marks=pytest.mark.exhaustive)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", with_others("sgd"))
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_optimizer_by_name_updates_shards_as_it_would_the_whole(names: list[str], zero: int, pool: Pool) -> None:
    for worst in pool.run(differences, names, zero, ranks=4):
        assert dict(zip(names, worst, strict=True)) == {name: pytest.approx(0, abs=2e-3) for name in names}


def test_every_optimizer_of_torch_is_taken_or_refused_with_the_reason() -> None:
    torchs = {name.lower() for name in vars(torch.optim) if name[0].isupper()} - {"optimizer"}
    assert torchs == {*OPTIMIZERS, *NOT_ELEMENTWISE}
    for name in ("LBFGS", "lbfgs"):
        with pytest.raises(ValueError, match=f"name is {name}, which multiplies vectors of all.*; use one of adamw, "):
            OptimizerConfig(name=name)
    with pytest.raises(ValueError, match=r"name is adamx, which is not known; use one of adamw, .*, sgd, muon$"):
        OptimizerConfig(name="adamx")


def small(mesh: ProcessMesh | None = None, zero: int = 0) -> nn.Module:
    model = Llama(LlamaConfig(**ONE_LAYER, intermediate_size=5, num_kv_heads=1, attention_bias=True))
    initialize(model, seed=0)
    return model if mesh is None else parallelize(model, mesh, replace(model.parallel_plan(), zero=zero))


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    """The weights after steps with gradients that are equal on every mesh."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute(gradient, layout_of(parameter)) if isinstance(parameter, DTensor) else gradient
        optimizer.step()
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def whole(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return to_global(parameter) if isinstance(parameter, DTensor) else parameter.clone()


def saved_and_read(names: list[str], folder: Path) -> dict[str, dict[str, dict[str, Tensor]]]:
    """By optimizer, weights after three steps: whole, on shards, and resumed on both from a save after two steps."""
    mesh, found = ProcessMesh.grid(dp=2), {}
    for number, name in enumerate(names):
        config = OptimizerConfig(name=name, lr=1e-2)
        alone, shards, again, one = small(), small(mesh, zero=3), small(mesh, zero=1 + number % 3), small()
        optimizers = [make_optimizer(each, config) for each in (alone, shards, again, one)]
        take_steps(shards, optimizers[1], range(2))
        save_checkpoint(shards, folder / name, optimizers[1])
        load_checkpoint(again, folder / name, optimizers[2])
        load_checkpoint(one, folder / name, optimizers[3])
        found[name] = {
            "alone": take_steps(alone, optimizers[0], range(3)),
            "shards": take_steps(shards, optimizers[1], range(2, 3)),
            "read on shards": take_steps(again, optimizers[2], range(2, 3)),
            "read by one": take_steps(one, optimizers[3], range(2, 3)),
        }
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", with_others("asgd", "rprop"))
def test_the_state_of_every_optimizer_is_saved_and_read(names: list[str], tmp_path: Path, pool: Pool) -> None:
    for found in pool.run(saved_and_read, names, tmp_path, ranks=2):
        for name, ways in found.items():
            for way, weights in ways.items():
                for key, values in weights.items():
                    truth = ways["alone"][key]
                    assert torch.allclose(values, truth, rtol=1e-6, atol=1e-7), f"{name}, {way}, {key}"
                    assert not torch.equal(values, small().get_parameter(key)), f"{name} has not moved {key}"


def decayed(axes: dict[str, int] | None) -> dict[str, float]:
    """By parameter, the share that is left after a step of weight decay with zero gradients."""
    model = GPT(GPTConfig(**ONE_LAYER))
    if axes is not None:
        parallelize(model, ProcessMesh.grid(**axes), replace(model.parallel_plan(), zero=1))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(model, OptimizerConfig(name="adamw", lr=0.5, weight_decay=0.5)).step()
    values = {name: whole(parameter).unique() for name, parameter in model.named_parameters()}
    assert all(each.numel() == 1 for each in values.values())
    return {name: each.item() for name, each in values.items()}


@pytest.mark.parametrize("axes", [None, {"dp": 2}], ids=["plain", "on-shards"])
def test_matrices_decay_and_norms_and_biases_do_not(axes: dict[str, int] | None, pool: Pool) -> None:
    found = decayed(None) if axes is None else pool.run(decayed, axes, ranks=2)[0]
    are_vectors = {name for name in found if name.endswith(".bias") or "norm" in name or "ln_" in name}
    assert are_vectors and are_vectors != set(found)
    assert found == {name: 1.0 if name in are_vectors else 0.75 for name in found}


def ops_of_an_update(name: str, axes: dict[str, int] | None) -> set[str]:
    model = small(None if axes is None else ProcessMesh.grid(**axes), zero=1)
    optimizer = make_optimizer(model, OptimizerConfig(name=name))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        take_steps(model, optimizer, range(1))
    return {event.name for event in found.events() or ()}


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_an_update_is_one_kernel_where_torch_has_one(name: str) -> None:
    assert f"aten::_fused_{name}_" in ops_of_an_update(name, None)
    assert "aten::sqrt" not in ops_of_an_update(name, None)


def test_an_update_of_shards_is_one_kernel_too(pool: Pool) -> None:
    for ops in pool.run(ops_of_an_update, "adamw", {"dp": 2}, ranks=2):
        assert "aten::_fused_adamw_" in ops


def test_rprop_alone_decays_nothing() -> None:
    model = small()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(model, OptimizerConfig(name="rprop", weight_decay=0.5)).step()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
