"""Sharded optimizers: weights after clipped steps equal one process's, and what a user does with weights works."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models import Llama, LlamaConfig, ParallelPlan, initialize, lay_out_batch, parallelize
from weft.reshard import GradientSync, OrderError, check_order, clip_grad_norm_, distribute, reshard

from tests.models.cases import whole
from tests.support.limits import PATIENCE
from tests.support.sample import together

CONFIG = LlamaConfig(
    vocab_size=31, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=4, max_seq_len=32
)
CLIP = 0.5  # of gradients whose norm is above 1, which a test asserts
LEVELS = [pytest.param(zero, id=f"zero{zero}") for zero in range(4)]


def make(config: LlamaConfig = CONFIG) -> Llama:
    model = Llama(config)
    initialize(model, seed=3)
    return model


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [5, 9]: uneven on purpose."""
    tokens = torch.randint(0, CONFIG.vocab_size, (5, 10), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """An eps that bounds the effect of rounding: a gradient's, 1e-8, changes an update by at most 1e-5."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5, fused=True)


class Trained:
    """A model on a mesh, and its training steps."""

    def __init__(
        self,
        axes: dict[str, int],
        config: LlamaConfig = CONFIG,
        plan: dict[str, Any] | None = None,
        prepare: Callable[[Any], None] = lambda model: None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
        **sync: Any,
    ) -> None:
        self.mesh, self.model = ProcessMesh.grid(**axes), make(config)
        self.plan = replace(self.model.parallel_plan(), **(plan or {}))
        prepare(self.model)
        parallelize(self.model, self.mesh, self.plan)
        self.sync = GradientSync(self.model, **sync)
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])

    def backward(self, step: int) -> None:
        laid = lay_out_batch(self.mesh, self.plan, *batch(step))
        loss = cross_entropy(self.model(laid.tokens, positions=laid.positions), laid.targets, denominator=45.0)
        (reshard(loss) if isinstance(loss, DTensor) else loss).backward()

    def step(self, step: int, microbatches: int = 1) -> float:
        for i in range(microbatches - 1):
            with self.sync.paused():
                self.backward(microbatches * step + i)
        self.backward(microbatches * step + microbatches - 1)
        self.sync.wait()
        norm = clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(parameter) for name, parameter in self.model.named_parameters()}


def three_steps(
    axes: dict[str, int],
    config: LlamaConfig = CONFIG,
    plan: dict[str, Any] | None = None,
    microbatches: int = 1,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
) -> tuple[dict[str, Tensor], list[float]]:
    trained = Trained(axes, config, plan, optimizer=optimizer)
    norms = [trained.step(step, microbatches) for step in range(3)]
    return trained.weights(), norms


def assert_same(found: tuple[Any, list[float]], truth: tuple[Any, list[float]]) -> None:
    """Allows three times the error that rounding causes in an update; see `adamw`."""
    assert min(truth[1]) > 2 * CLIP  # the clipping bites
    assert found[1] == pytest.approx(truth[1], rel=1e-4)
    for name, weight in truth[0].items():
        torch.testing.assert_close(found[0][name], weight, rtol=1e-5, atol=3e-5, msg=lambda m, n=name: f"{n}: {m}")


MESHES = [
    pytest.param({"dp": 2}, {}, id="dp2"),
    pytest.param({"dp": 4}, {}, id="dp4", marks=pytest.mark.exhaustive),
    pytest.param({"dp": 2, "tp": 2}, {}, id="dp2-tp2", marks=pytest.mark.exhaustive),
    pytest.param({"dp": 2, "tp": 2}, {"sequence": True}, id="dp2-tp2-sequence"),
    pytest.param({"dp": 2, "cp": 2}, {"context": "all_gather"}, id="dp2-cp2"),
    pytest.param(
        {"dp": 2, "cp": 2, "tp": 2},
        {"sequence": True, "context": "all_gather"},
        id="dp2-cp2-tp2",
        marks=pytest.mark.exhaustive,
    ),
]
VARIANTS = [
    pytest.param({}, id="plain"),
    pytest.param({"tie_embeddings": True}, id="tied"),
    pytest.param({"num_kv_heads": 1, "attention_bias": True}, id="one-key-head"),
    pytest.param({"vocab_size": 33, "intermediate_size": 45, "mlp_bias": True}, id="uneven"),
]


Case = tuple[int, dict[str, Any]]  # the ZeRO level, and changes to the config


@functools.cache
def truth_of(config: LlamaConfig, **options: Any) -> tuple[dict[str, Tensor], list[float]]:
    return three_steps({"dp": 1}, config, **options)


def each_case(axes: dict[str, int], plan: dict[str, Any], cases: list[Case], truths: list[Any]) -> list[str]:
    """The errors, by case."""
    wrong = []
    for (zero, change), truth in zip(cases, truths, strict=True):
        found = three_steps(axes, replace(CONFIG, **change), {**plan, "zero": zero})
        try:
            assert_same(found, truth)
        except AssertionError as error:
            wrong.append(f"zero={zero}, {change}: {error}")
    return wrong


@pytest.mark.table
@pytest.mark.parametrize(("axes", "plan", "cases"), together(MESHES, LEVELS, VARIANTS))
def test_paddlenlp_9412_sharding_levels_end_three_clipped_steps_with_the_weights_of_one_process(
    axes: dict[str, int], plan: dict[str, Any], cases: list[Case], pool: Any, combinations: Callable[[int], None]
) -> None:
    combinations(len(cases))
    truths = [truth_of(replace(CONFIG, **change)) for _, change in cases]
    found = pool.run(each_case, axes, plan, cases, truths, ranks=ProcessMesh.grid(**axes).size)
    assert not any(found), "\n".join(said for wrong in found for said in wrong)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"zero": 3, "recompute": "full"}, id="recomputed"),
        pytest.param({"zero": 3, "recompute": "selective"}, id="selectively"),
        pytest.param({"zero": 3, "regather": False}, id="kept-for-backward"),
        pytest.param({"zero": 3, "zero_over": ("dp_shard",)}, id="replicated-over-an-axis"),
    ],
)
def test_options_change_no_weight(plan: dict[str, Any], pool: Any) -> None:
    axes = {"dp_replica": 2, "dp_shard": 2} if "zero_over" in plan else {"dp": 2}
    for found in pool.run(three_steps, axes, CONFIG, plan, ranks=ProcessMesh.grid(**axes).size):
        assert_same(found, truth_of(CONFIG))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-1, momentum=0.9, foreach=True)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=1e-2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", [sgd, adagrad])
@pytest.mark.parametrize("zero", LEVELS[1:])
def test_an_optimizer_that_works_by_the_element_needs_no_change(zero: int, optimizer: Any, pool: Any) -> None:
    truth = truth_of(CONFIG, optimizer=optimizer)
    for found in pool.run(three_steps, {"dp": 2}, CONFIG, {"zero": zero}, 1, optimizer, ranks=2):
        assert_same(found, truth)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", LEVELS)
def test_gradients_of_several_passes_add_up(zero: int, pool: Any) -> None:
    truth = truth_of(CONFIG, microbatches=2)
    for found in pool.run(three_steps, {"dp": 2}, CONFIG, {"zero": zero}, 2, ranks=2):
        assert_same(found, truth)


def freeze(model: Any) -> None:
    """Freeze all parameters but the norms and one projection, as fine-tuning does."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "o_proj" in name)


@pytest.mark.parametrize("zero", LEVELS[1:])
def test_frozen_parameters_are_gathered_and_left(zero: int, pool: Any) -> None:
    truth = Trained({"dp": 1}, prepare=freeze)
    for step in range(2):
        truth.step(step)
    weights = truth.weights()
    for found in pool.run(frozen_steps, zero, ranks=2):
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-4, msg=f"{name} differs")


def frozen_steps(zero: int) -> dict[str, Tensor]:
    trained = Trained({"dp": 2}, CONFIG, {"zero": zero}, prepare=freeze)
    for step in range(2):
        trained.step(step)
    return trained.weights()


class Scaled(nn.Module):
    """x * weight + bias, both in the given dtype."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(size)
        self.weight = nn.Parameter(torch.randn(size, generator=generator).to(dtype))
        self.bias = nn.Parameter(torch.randn(size, generator=generator).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) * self.weight + self.bias).double()


class Mixed(nn.Module):
    """Two dtypes, a scalar, a parameter with fewer elements than ranks, a module in two blocks, an unused module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        one, several = Scaled(1, torch.float64), [Scaled(5, torch.float32), Scaled(5, torch.float64)]
        self.layers = nn.ModuleList([nn.Sequential(one, several[0]), nn.Sequential(several[1], one)])
        self.again, self.unused = one, Scaled(4, torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.again(x) * self.scale


def mixed_steps(zero: int | None) -> tuple[dict[str, Tensor], float]:
    model, mesh = Mixed(), ProcessMesh.grid(dp=4)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    if zero is not None:
        parallelize(model, mesh, ParallelPlan(zero=zero))
        x = distribute(x, Layout(mesh, {"dp": Shard(0)}))
    sync, optimizer = GradientSync(model), torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        loss = model(x).square().sum()
        (reshard(loss) if isinstance(loss, DTensor) else loss).backward()
        sync.wait()
        norm = clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    assert norm > CLIP
    return {name: whole(parameter) for name, parameter in model.named_parameters()}, float(norm)


@pytest.mark.parametrize("zero", LEVELS)
def test_parameters_of_all_kinds(zero: int, pool: Any) -> None:
    weights, norm = mixed_steps(None)
    for found, their_norm in pool.run(mixed_steps, zero, ranks=4):
        assert their_norm == pytest.approx(norm, rel=1e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7, msg=f"{name} differs")


def test_a_step_before_wait_is_refused(pool: Any) -> None:
    pool.run(step_before_wait, ranks=2)


def step_before_wait() -> None:
    trained = Trained({"dp": 2}, CONFIG, {"zero": 2})
    trained.backward(0)
    with pytest.raises(RuntimeError, match="wait"):
        trained.optimizer.step()
    trained.sync.wait()
    trained.sync.close()
    trained.optimizer.zero_grad()
    trained.backward(0)
    with pytest.raises(RuntimeError, match="keep a GradientSync"):
        trained.optimizer.step()


def written_and_read() -> list[float]:
    """A forward sees shards changed by hand, without an optimizer; copies, also pickled, are models of their own."""
    trained = Trained({"dp": 2}, CONFIG, {"zero": 1})
    tokens = lay_out_batch(trained.mesh, trained.plan, *batch(0)).tokens
    with torch.no_grad():
        before = whole(trained.model(tokens))
        copies = [copy.deepcopy(trained.model), pickle.loads(pickle.dumps(trained.model))]
        for parameter in trained.model.parameters():
            parameter.to_local().mul_(0.5)
        changed = whole(trained.model(tokens))
        fresh = Trained({"dp": 2}, CONFIG, {"zero": 3}).model
        for parameter in fresh.parameters():
            parameter.mul_(0.5)
        assert torch.equal(whole(fresh(tokens)), changed)
        assert not torch.equal(before, changed)
        for copied in copies:
            assert torch.equal(whole(copied(tokens)), before)
            assert all(type(a) is type(b) for a, b in zip(copied.modules(), trained.model.modules(), strict=True))
    return [float(before.sum())]


def test_a_forward_computes_with_what_the_shards_are(pool: Any) -> None:
    pool.run(written_and_read, ranks=2)


def in_order(layers: tuple[int, ...]) -> str:
    """The report of `check_order` after two steps. layers: the number of layers on each rank."""

    def shorten(model: Any) -> None:
        del model.layers[layers[dist.get_rank()] :]

    with check_order(timeout=PATIENCE):
        trained = Trained({"dp": 2}, CONFIG, {"zero": 3}, prepare=shorten)
        try:
            for step in range(2):
                trained.step(step)
        except OrderError as error:
            return str(error)
    return ""


@pytest.mark.exhaustive
def test_the_order_check_sees_the_gathers(pool: Any) -> None:
    assert pool.run(in_order, (2, 2), ranks=2) == ["", ""]
    for said in pool.run(in_order, (2, 1), ranks=2):
        first, second = (line for line in said.splitlines() if "gathered over ('dp',)" in line)
        assert "rank 0" in first and "(48, 32)" in first  # a block's
        assert "rank 1" in second and "shapes [(32,)]" in second  # the last norm's


@pytest.mark.parametrize(
    ("plan", "axes", "message"),
    [
        pytest.param({"zero": 4}, {"dp": 2}, "zero is 4; it must be one of 0, 1, 2, 3", id="above-3"),
        pytest.param({"zero": -1}, {"dp": 2}, "zero is -1; it must be", id="below-0"),
        pytest.param({"zero": 1}, {"tp": 2}, "shards over the axes of data.*has tp", id="no-data-axis"),
        pytest.param({"zero": 1, "zero_over": ("cp",)}, {"dp": 2}, "over 'cp', which is not there", id="not-there"),
        pytest.param({"zero": 1, "zero_over": ("tp",)}, {"dp": 2, "tp": 2}, "which shards layers", id="tensor-axis"),
        pytest.param({"zero": 1, "zero_over": "dp"}, {"dp": 2}, "give the names of axes", id="a-word"),
    ],
)
def test_a_mistake_is_one_error_without_any_process(plan: dict[str, Any], axes: dict[str, int], message: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=message):
        parallelize(model, ProcessMesh.grid(**axes), replace(model.parallel_plan(), **plan))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def already_sharded() -> None:
    model = make()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    with pytest.raises(ValueError, match=r"is a DTensor already.*fully_shard\(\)"):
        parallelize(model, ProcessMesh.grid(dp=2), ParallelPlan(zero=2))


def test_a_model_that_fully_shard_has_sharded_is_refused(pool: Any) -> None:
    pool.run(already_sharded, ranks=2)
