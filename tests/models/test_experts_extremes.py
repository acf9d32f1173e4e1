"""Routers at their extremes on a mesh: all tokens to one expert, idle experts, every expert, a single expert.

A run trains under one mesh, is saved, goes on under another mesh, and generates: losses, weights and tokens are those
of one process. Numbers are float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    forward_backward,
    generate,
    load_checkpoint,
    lora,
    parallelize,
    save_checkpoint,
)
from weft.models.train.config import OptimizerConfig
from weft.models.train.optimizer import make_optimizer

from tests.models.cases import whole
from tests.models.test_experts_parallel import make
from tests.models.test_lora_experts import with_values

VOCABULARY, ROWS, T, STEPS, SAVED = 29, 8, 6, 5, 3  # saved after 3 of 5 steps
ALLOWED = 1e-8  # of a loss, of a weight
FAVORED = 50.0  # correction bias of a favored expert, above any score


@dataclass(frozen=True)
class Extreme:
    """A model and two meshes. favored: experts chosen by all tokens, through the correction bias."""

    options: dict[str, Any]
    before: dict[str, int]
    after: dict[str, int]
    plan: dict[str, Any] = field(default_factory=dict)  # before
    plan_after: dict[str, Any] = field(default_factory=dict)
    favored: tuple[int, ...] = ()
    optimizer: str = "adamw"
    targets: tuple[str, ...] = ()  # of adapters

    @property
    def config(self) -> QwenMoeConfig:
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY, "hidden_size": 12, "intermediate_size": 10, "num_layers": 2, "num_heads": 4,
            "num_kv_heads": 4, "head_dim": 4, "max_seq_len": 16, "moe_intermediate_size": 6, "num_experts": 4,
        }  # fmt: skip
        return QwenMoeConfig(**sizes | self.options)

    def model(self) -> Any:
        model = make(self.config)
        for name, parameter in model.named_parameters():
            if name.endswith("correction_bias") and self.favored:
                with torch.no_grad():
                    parameter.zero_()[list(self.favored)] = FAVORED
        return with_values(lora(model, 2, 6.0, list(self.targets)).double()) if self.targets else model.double()

    def laid_out(self, sizes: dict[str, int], plan: dict[str, Any]) -> Any:
        model = self.model()
        return parallelize(model, ProcessMesh.grid(**sizes), replace(model.parallel_plan(), **plan))


BIASED = {"router_score": "sigmoid", "router_bias_rate": 0.01, "seq_aux": True}
EP4, EP2 = {"experts": ExpertPlan(size=4, tokens="exchange")}, {"experts": ExpertPlan(size=2, tokens="gather")}
EXPERTS = ("layers.*.mlp.experts.*_proj",)
CASES = {
    "one-for-all": Extreme(
        {"experts_per_token": 1, **BIASED}, {"dp": 4}, {"dp": 2, "tp": 2}, {**EP4, "zero": 3, "recompute": "full"},
        {**EP2, "sequence": True}, favored=(2,), optimizer="muon",
    ),
    "idle": Extreme(  # experts 1 and 3 never have a token
        {"experts_per_token": 2, **BIASED}, {"dp": 2, "cp": 2}, {"dp": 4}, {**EP2, "context": "all_gather", "zero": 2},
        {**EP4, "zero": 1}, favored=(0, 2), optimizer="muon",
    ),
    "idle-adapters": Extreme(
        {"experts_per_token": 2, **BIASED}, {"dp": 4}, {"dp": 2, "tp": 2}, {**EP4, "zero": 3}, EP2, favored=(0, 2),
        targets=EXPERTS,
    ),
    "every-expert": Extreme(
        {"experts_per_token": 4, "shared_expert_size": 7, "shared_expert_gate": True}, {"dp": 4}, {"dp": 2, "cp": 2},
        {**EP4, "zero": 3, "recompute": "selective"}, {**EP2, "context": "ulysses"}, optimizer="muon",
    ),
    "one-expert": Extreme(
        {"num_experts": 1, "experts_per_token": 1}, {"dp": 4}, {"dp": 2, "tp": 2}, {"zero": 3}, {"sequence": True}
    ),
    "stages": Extreme(
        {"experts_per_token": 1, **BIASED}, {"pp": 2, "dp": 2}, {"dp": 2, "tp": 2},
        {**EP2, "pipeline": PipelinePlan(schedule="1f1b", microbatches=4), "recompute": "full"},
        {**EP2, "sequence": True}, favored=(1,), optimizer="muon",
    ),
}  # fmt: skip


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (ROWS, T + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def optimizer_of(case: Extreme, model: Any) -> torch.optim.Optimizer:
    return make_optimizer(model, OptimizerConfig(name=case.optimizer, lr=1e-3))  # type: ignore[arg-type]


def train(case: Extreme, model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    balance = 0.3 if case.config.seq_aux else 0.0  # a mean over microbatches depends on their number
    losses = []
    for step in steps:
        criterion = RouterLosses(cross_entropy, balance=balance, z=0.05)
        losses.append(forward_backward(model, criterion, *batch(step), router=True).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def prompts() -> Tensor:
    return torch.randint(0, VOCABULARY, (3, 4), generator=torch.Generator().manual_seed(7))


def alone(case: Extreme) -> tuple[list[float], dict[str, Tensor], Tensor]:
    model = case.model()
    losses = train(case, model, optimizer_of(case, model), range(STEPS))
    weights = {name: each.detach() for name, each in model.named_parameters()}
    return losses, weights, generate(model, prompts(), max_new_tokens=5)


def on_meshes(name: str, folder: Path, truth: Any) -> list[str]:
    case, (losses, weights, tokens) = CASES[name], truth
    model = case.laid_out(case.before, case.plan)
    optimizer = optimizer_of(case, model)
    found = train(case, model, optimizer, range(SAVED))
    save_checkpoint(model, folder / "saved", optimizer)
    model = case.laid_out(case.after, case.plan_after)
    optimizer = optimizer_of(case, model)
    load_checkpoint(model, folder / "saved", optimizer)
    found += train(case, model, optimizer, range(SAVED, STEPS))
    wrong = []
    if found != pytest.approx(losses, rel=ALLOWED):
        wrong.append(f"the losses are {found}, and {losses} on one process")
    for key, parameter in model.named_parameters():
        off = (whole(parameter.detach()) - weights[key]).abs().max().item()
        if not off <= ALLOWED:
            wrong.append(f"{key} is off by {off}")
    drawn = generate(model, prompts(), max_new_tokens=5)
    if not torch.equal(drawn, tokens):
        wrong.append(f"generated {drawn}, and {tokens} on one process")
    return wrong


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_trained_saved_trained_elsewhere_and_drawn_as_on_one_process(name: str, tmp_path: Path, pool: Any) -> None:
    found = pool.run(on_meshes, name, tmp_path, alone(CASES[name]), ranks=4)
    assert not any(found), "\n".join(said for of_rank in found for said in of_rank)


def test_a_favored_expert_has_all_tokens_and_an_idle_one_none() -> None:
    case = CASES["idle"]
    result = RouterLosses(cross_entropy)(case.model()(batch(0)[0], router=True), batch(0)[1])
    assert result.routers is not None
    assert result.routers.load.tolist() == [[ROWS * T, 0, ROWS * T, 0]] * 2
