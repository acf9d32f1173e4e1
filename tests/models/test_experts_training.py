"""Training models with experts: the metrics of routers, correction biases, and a router that is not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import (
    ExpertPlan,
    PipelinePlan,
    QwenMoeConfig,
    RouterLosses,
    RouterReport,
    forward_backward,
    initialize,
    lora,
    parallelize,
    update_correction_biases,
)
from weft.models.data.text import find_corpus
from weft.models.families import make_model
from weft.models.step.find_gradients import find_gradients
from weft.models.step.forward_backward import divide_batch
from weft.models.train.config import DataConfig, MeshConfig, PlanConfig, TrainConfig
from weft.models.train.report import ROUTER_METRICS
from weft.models.train.run import Run
from weft.models.train.step_metrics import UnreadStep, name_failing_router, router_metrics
from weft.models.train.trainer import Trainer, TrainingError
from weft.reshard import GradientSync

from tests.models.cases import whole
from tests.support.pool import Pool

CONFIG = QwenMoeConfig(
    vocab_size=257,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    num_experts=4,
    experts_per_token=2,
    moe_intermediate_size=12,
    mlp_only_layers=(0,),
    router_score="sigmoid",
    router_bias_rate=0.125,
    router_z_loss_coef=0.01,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("what is said beforehand, and what is done " * 20)
    return str(path)


def two_steps(text: str, axes: dict[str, int], plan: dict[str, Any]) -> dict[str, Any]:
    """The metrics of two steps, the load, and the correction biases of this rank's layers."""
    config = TrainConfig(model=CONFIG, data=DataConfig(batch_size=4, sequence_length=8), plan=PlanConfig(**plan))
    run = Run(recipe="small", config=config, corpus=find_corpus(Path(text)), folder=Path(text).parent, **axes)
    trainer = Trainer(run, torch.device("cpu"))
    trainer.first_step()
    trainer.step(1)
    metrics = trainer.read_metrics()
    biases = {n: whole(each) for n, each in trainer.model.named_parameters() if n.endswith("correction_bias")}
    return {"metrics": [[getattr(m, n) for n in ROUTER_METRICS] for m in metrics], "load": trainer.load} | biases


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axes", "plan"),
    [
        pytest.param({"dp": 2, "tp": 2}, {"sequence": True, "zero": 3, "microbatches": 2}, id="tensor-zero3"),
        pytest.param(
            {"pp": 2, "dp": 2, "tp": 1}, {"schedule": "1f1b", "microbatches": 2, "split": "layers"}, id="stages"
        ),
    ],
)
def test_metrics_and_biases_are_those_of_one_process(
    text: str, axes: dict[str, int], plan: dict[str, Any], pool: Pool
) -> None:
    (alone,) = pool.run(two_steps, text, {"dp": 1, "tp": 1}, {"microbatches": 2}, ranks=1)
    names = {f"layers.{i}.mlp.correction_bias" for i in (1, 2, 3)}
    assert names <= alone.keys()
    assert all(set(alone[name].tolist()) <= {-0.25, -0.125, 0.0, 0.125, 0.25} for name in names)
    assert any(alone[name].any() for name in names)
    found: set[str] = set()
    for each in pool.run(two_steps, text, axes, plan, ranks=4):
        for ours, wanted in zip(each["metrics"], alone["metrics"], strict=True):
            assert ours == pytest.approx(wanted, rel=1e-5)
        assert torch.equal(each["load"], alone["load"])
        for name in names & each.keys():
            assert torch.equal(each[name], alone[name])
            found.add(name)
    assert found == names


def biases_of_a_program(axes: dict[str, int], changes: dict[str, Any]) -> dict[str, Tensor]:
    """The correction biases of this rank's layers after two steps of a loop with `forward_backward`."""
    model: Any = make_model(CONFIG)
    initialize(model, 0)
    if axes:
        parallelize(model, ProcessMesh.grid(**axes), replace(model.parallel_plan(), **changes))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    reports: list[RouterReport] = []
    criterion = RouterLosses(cross_entropy, balance=0.01, report=reports.append)
    for seed in range(2):
        tokens = torch.randint(0, 257, (4, 9), generator=torch.Generator().manual_seed(seed))
        forward_backward(model, criterion, tokens[:, :-1], tokens[:, 1:], microbatches=2, router=True)
        optimizer.step()
        optimizer.zero_grad()
        (report,) = reports
        assert report.load.sum(1).tolist() == [4 * 8 * CONFIG.experts_per_token] * 3
        update_correction_biases(model, reports.pop().load, CONFIG.router_bias_rate)
    return {n: whole(each) for n, each in model.named_parameters() if n.endswith("correction_bias")}


@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        pytest.param({"dp": 2, "tp": 1}, {"experts": ExpertPlan(size=2)}, id="experts"),
        pytest.param({"pp": 2}, {"pipeline": PipelinePlan(microbatches=2)}, id="stages"),
    ],
)
def test_a_program_balances_by_biases_as_one_process_does(
    axes: dict[str, int], changes: dict[str, Any], pool: Pool
) -> None:
    alone = biases_of_a_program({}, {})
    assert len(alone) == 3 and any(bias.any() for bias in alone.values())
    found: dict[str, Tensor] = {}
    for each in pool.run(biases_of_a_program, axes, changes, ranks=2):
        assert all(torch.equal(bias, alone[name]) for name, bias in each.items())
        found |= each
    assert found.keys() == alone.keys()


def test_biases_are_updated_with_loads_of_the_model() -> None:
    model: Any = make_model(CONFIG)
    with pytest.raises(ValueError, match=r"load has the shape \(4,\); give RouterReport.load of a step, \(3, 4\)"):
        update_correction_biases(model, torch.zeros(4), 0.1)
    without = make_model(replace(CONFIG, router_bias_rate=0.0))
    with pytest.raises(ValueError, match="no correction biases; give QwenMoeConfig a router_bias_rate above 0"):
        update_correction_biases(without, torch.zeros(3, 4), 0.1)


def step_of(model: Any) -> UnreadStep:
    tokens: Tensor = torch.randint(0, 257, (2, 8), generator=torch.Generator().manual_seed(0))
    criterion = RouterLosses(cross_entropy)
    batch = divide_batch(model, tokens, tokens, 1, {"router": True})
    return UnreadStep(1, find_gradients(model, criterion, batch, GradientSync(model)), 0.0)


def test_a_router_that_is_not_finite_is_named_with_its_layer() -> None:
    model: Any = make_model(CONFIG)
    initialize(model, 0)
    assert name_failing_router(step_of(model).result, CONFIG) == ""
    with torch.no_grad():
        model.layers[2].mlp.gate.weight[1, 3] = math.nan
    step = step_of(model)
    assert not math.isfinite(step.result.loss)
    assert (
        name_failing_router(step.result, CONFIG) == "; the router of layer 2 is the first whose logits are not finite"
    )
    (metrics,) = router_metrics([step])
    assert math.isnan(metrics["z"])


def message_of_a_nan(text: str, plan: dict[str, Any], layer: int) -> str:
    """The error of a run over two stages and "ep" after a layer's router becomes NaN, in step 2."""
    config = TrainConfig(
        model=CONFIG,
        data=DataConfig(batch_size=4, sequence_length=8),
        plan=PlanConfig(**plan),
        mesh=MeshConfig(pp=2, dp=2, tp=1, ep=2),
    )
    run = Run(recipe="small", config=config, corpus=find_corpus(Path(text)), folder=Path(text).parent, pp=2, dp=2, tp=1)
    trainer = Trainer(run, torch.device("cpu"))
    trainer.first_step()
    trainer.read_metrics()
    for name, parameter in trainer.model.named_parameters():
        if name == f"layers.{layer}.mlp.gate.weight":
            with torch.no_grad():
                parameter.fill_(math.nan)
    for step in (1, 2):
        trainer.step(step)
    with pytest.raises(TrainingError) as caught:
        trainer.read_metrics()
    return str(caught.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("tokens", ["gather", "exchange"])
def test_a_nan_in_a_router_ends_a_run_over_stages_and_ep_with_one_error_on_all_ranks(
    tokens: str, layer: int, text: str, pool: Pool
) -> None:
    plan = {"schedule": "1f1b", "microbatches": 2, "split": "layers", "experts_tokens": tokens}
    first, *others = pool.run(message_of_a_nan, text, plan, layer, ranks=4)
    assert others == [first] * 3
    assert "the loss is nan at step 2" in first
    assert f"; the router of layer {layer} is the first whose logits are not finite" in first


def test_adapters_of_experts_are_refused_with_the_layers_that_take_them() -> None:
    model = make_model(CONFIG)
    with pytest.raises(
        ValueError, match=r"an Experts|a Experts; adapters are for Linear layers: .* 'layers\.\*\.mlp\.gate'"
    ):
        lora(model, 2, 4.0, ["layers.*.mlp.experts"])
    initialize(model, 0)
    lora(model, 2, 4.0, ["layers.[123].mlp.gate", "layers.*.self_attn.[qv]_proj"])
