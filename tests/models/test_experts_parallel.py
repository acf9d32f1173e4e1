"""On a mesh, models with mixtures of experts have the loss, parts of the loss and gradients of a single process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh, derive_key
from weft.models import (
    MixtralConfig,
    PipelinePlan,
    QwenMoeConfig,
    RouterLosses,
    initialize,
    parallelize,
    record,
)
from weft.models.config import MixtureConfig
from weft.models.families import make_model
from weft.models.step.criterion import weight_criterion
from weft.models.step.find_gradients import StepResult, find_gradients
from weft.models.step.forward_backward import divide_batch
from weft.models.train.measure import CollectiveCount
from weft.reshard import GradientSync

from tests.models.cases import whole

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 32,
}
CONFIGS: dict[str, MixtureConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_experts=4, sliding_window=5),
    "qwen3-moe": QwenMoeConfig(
        **SIZES, num_experts=6, experts_per_token=3, moe_intermediate_size=12, decoder_sparse_step=2
    ),
    "dense-first": QwenMoeConfig(
        **SIZES, num_experts=6, experts_per_token=2, moe_intermediate_size=12, mlp_only_layers=(0, 1)
    ),
    "deepseek-router": QwenMoeConfig(
        **SIZES,
        num_experts=8,
        experts_per_token=2,
        moe_intermediate_size=12,
        router_score="sigmoid",
        router_scale=1.5,
        router_bias_rate=0.01,
        expert_groups=(4, 2),
        shared_expert_size=20,
        shared_expert_gate=True,
    ),
}
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1}
BALANCE, Z = 0.3, 0.05
ROWS, T, MICROBATCHES = 8, 10, 2
MESHES = [
    pytest.param({"dp": 2}, {}, id="dp"),
    pytest.param({"cp": 2}, {"context": "all_gather"}, id="cp"),
    pytest.param({"tp": 2}, {}, id="tp"),
    pytest.param({"tp": 2}, {"sequence": True}, id="tp-sequence"),
    pytest.param({"dp": 2, "tp": 2}, {"sequence": True, "loss_parallel": False}, id="dp-tp-sequence-whole-logits"),
    pytest.param({"dp": 2, "cp": 2}, {"context": "ulysses", "zero": 1}, id="dp-cp-zero-1"),
    pytest.param({"dp": 2}, {"zero": 3, "recompute": "full"}, id="dp-zero-3-recompute"),
    pytest.param({"tp": 2}, {"sequence": True, "recompute": "selective"}, id="tp-sequence-selective"),
    pytest.param({"pp": 2}, {"pipeline": "1f1b"}, id="pp"),
    pytest.param({"pp": 2, "dp": 2}, {"pipeline": "gpipe"}, id="pp-dp"),
    pytest.param({"pp": 2, "tp": 2}, {"pipeline": "1f1b", "sequence": True}, id="pp-tp-sequence"),
]


def make(config: MixtureConfig) -> Any:
    """A model whose norms and correction biases are random too."""
    model = make_model(config)
    initialize(model, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 31, (ROWS, T + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def stepped(model: nn.Module, sync: GradientSync, inputs: dict[str, Any]) -> tuple[StepResult, CollectiveCount]:
    """A step of two microbatches, with its collectives."""
    tokens, targets = batch()
    criterion = RouterLosses(cross_entropy, balance=BALANCE, z=Z)
    microbatches = divide_batch(model, tokens, targets, MICROBATCHES, {"router": True, **inputs})
    weighted = weight_criterion(criterion, microbatches, targets)
    with CollectiveCount() as count:
        return find_gradients(model, weighted, microbatches, sync), count


def inputs_of(config: MixtureConfig) -> dict[str, Any]:
    return {"dropout_key": derive_key(3, "dropout", 0)} if config.dropout else {}


def plan_of(model: Any, options: dict[str, Any]) -> Any:
    options = dict(options)
    if "pipeline" in options:
        options["pipeline"] = PipelinePlan(schedule=options["pipeline"], microbatches=MICROBATCHES)
    return replace(model.parallel_plan(), **options)


def one_step(axes: dict[str, int], options: dict[str, Any], config: MixtureConfig) -> dict[str, Any]:
    mesh, model = ProcessMesh.grid(**axes), make(config)
    plan = plan_of(model, options)
    predicted = record(
        make(config),
        mesh,
        plan,
        batch=(ROWS, T),
        criterion=RouterLosses(cross_entropy, balance=BALANCE, z=Z),
        rank=torch.distributed.get_rank(),
        inputs={"router": True, **inputs_of(config)},
        microbatches=MICROBATCHES,
    )
    parallelize(model, mesh, plan)
    result, count = stepped(model, GradientSync(model), inputs_of(config))
    parts = result.parts
    assert parts is not None
    issued = count.take_each()
    return {
        "loss": result.loss,
        "balance": parts.balance,
        "z": parts.z,
        "load": parts.load,
        "gradients": {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None},
        "bytes": (sum(each.nbytes for each in issued), sum(each.nbytes for each in predicted.entries)),
    }


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("axes", "options"), MESHES)
def test_loss_its_parts_and_gradients_are_those_of_one_process(
    axes: dict[str, int], options: dict[str, Any], name: str, pool: Any
) -> None:
    config = CONFIGS[name]
    alone = make(config)
    wanted, _ = stepped(alone, GradientSync(alone), inputs_of(config))
    assert wanted.parts is not None
    ranks = 1
    for size in axes.values():
        ranks *= size
    found: set[str] = set()
    for each in pool.run(one_step, axes, options, config, ranks=ranks):
        assert abs(each["loss"] - wanted.loss) <= 1e-5
        assert abs(each["balance"] - wanted.parts.balance) <= 1e-5
        torch.testing.assert_close(each["z"], wanted.parts.z, rtol=1e-5, atol=1e-6)
        assert torch.equal(each["load"], wanted.parts.load)
        for parameter, gradient in each["gradients"].items():
            own = alone.get_parameter(parameter).grad
            assert (gradient - own).abs().max() <= 1e-5 * own.abs().max() + 1e-7, parameter
            found.add(parameter)
    assert found == {n for n, p in alone.named_parameters() if p.requires_grad}
