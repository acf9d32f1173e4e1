"""Random mixtures under random plans: loss, parts of the loss, gradients and norm equal those of a single process.

A seed draws a model's sizes, the router's options, a mesh, a plan, microbatches, packed documents, dropout, frozen
parameters or adapters. Numbers are float64: an error of 1e-9 is a fault, not rounding.
"""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh, derive_key
from weft.models import (
    ExpertPlan,
    MixtralConfig,
    PipelinePlan,
    QwenMoeConfig,
    RouterLosses,
    clip_gradients,
    load_checkpoint,
    lora,
    parallelize,
    record,
    save_checkpoint,
)
from weft.models.checks import divisors
from weft.models.config import MixtureConfig
from weft.models.schedules.schedule import NAMES
from weft.models.step.criterion import weight_criterion
from weft.models.step.forward_backward import divide_batch
from weft.models.train.config import MuonConfig, OptimizerConfig
from weft.models.train.optimizer import make_optimizer
from weft.reshard import GradientSync, distribute, layout_of

from tests.models.stepping import observed_microbatches
from tests.models.test_every_mesh import beside
from tests.models.test_experts_parallel import make
from tests.models.test_lora_experts import with_values

VOCABULARY, STEPS, RATE = 29, 2, 0.05
ALLOWED = 1e-9  # of the loss, of a gradient's largest element, of the norm
CRITERION = RouterLosses(cross_entropy, balance=0.3, z=0.05)
TARGETS = (["*_proj"], ["layers.*.mlp.experts.*_proj"], ["layers.*.mlp.experts.down_proj", "*.q_proj"])
FROZEN = ("experts", "embed_tokens", "mlp.gate.weight", "self_attn", "layers.0.", "layernorm")
AT_ONCE = 4  # cases in a call of the worker processes


@dataclass(frozen=True, slots=True)
class Case:
    """A drawn training run. frozen: parts of names of parameters without gradients. targets: of adapters, or none."""

    config: MixtureConfig
    sizes: dict[str, int]
    changes: dict[str, Any]  # of the model's own plan
    rows: int
    length: int
    microbatches: int
    packed: bool
    frozen: tuple[str, ...]
    targets: list[str] | None
    records: bool  # whether the step is recorded, too

    def inputs(self, step: int) -> dict[str, Any]:
        found: dict[str, Any] = {"router": True}
        if self.config.dropout:
            found["dropout_key"] = derive_key(3, "dropout", step)
        if self.packed:
            starts = torch.rand(self.rows, self.length, generator=torch.Generator().manual_seed(step)) < 0.3
            starts[:, 0] = False
            found["documents"] = starts.long().cumsum(-1)
        return found

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 + step)
        tokens = torch.randint(0, VOCABULARY, (self.rows, self.length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def model(self) -> Any:
        model = make(self.config).double()
        for name, parameter in model.named_parameters():
            if any(part in name for part in self.frozen):
                parameter.requires_grad_(False)
        return with_values(lora(model, 2, 6.0, self.targets).double()) if self.targets else model


def draw(seed: int, ranks: int) -> Case:
    """The case of a seed on a mesh of `ranks` processes."""
    chance = random.Random(f"{seed} of {ranks}")

    def often(share: float) -> bool:
        return chance.random() < share

    sizes = dict.fromkeys(("pp", "dp", "cp", "tp"), 1)
    left = ranks
    while left > 1:
        sizes[chance.choice(("pp", "dp", "dp", "cp", "tp"))] *= 2
        left //= 2
    kv_heads = max(sizes["tp"], chance.choice((1, 2, 4)))
    pipeline = None
    microbatches = chance.choice((1, 1, 2, 3))
    if sizes["pp"] > 1:
        microbatches = chance.choice((2, 4)) * sizes["pp"] // 2
        pipeline = PipelinePlan(schedule=chance.choice(NAMES), microbatches=microbatches)
    stages = 1 if pipeline is None else pipeline.make_schedule(sizes["pp"]).num_stages
    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": chance.choice((6, 8, 10, 16)),
        "intermediate_size": chance.choice((5, 8, 14)) * sizes["tp"],
        "num_layers": max(stages, chance.choice((1, 2, 3))),
        "num_heads": kv_heads * chance.choice((1, 2)),
        "num_kv_heads": kv_heads,
        "head_dim": chance.choice((2, 4)),
        "max_seq_len": 16,
        "num_experts": (experts := chance.choice((2, 3, 4, 6, 8, 12))),
        "experts_per_token": (k := chance.randint(1, min(experts, 5))),
        "tie_embeddings": often(0.2),
        "sliding_window": chance.choice((0, 0, 3)),
    } | ({"dropout": 0.2, "attention_dropout": 0.1} if often(0.3) else {})
    if often(0.2):
        config: MixtureConfig = MixtralConfig(**shared)
    else:
        score = chance.choice(("softmax", "sigmoid"))
        groups = [
            (count, chosen)
            for count in divisors(experts)
            for chosen in range(1, count + 1)
            if experts // count > 1 and chosen * (experts // count) >= k
        ]
        shared_size = chance.choice((0, 3 * sizes["tp"]))
        config = QwenMoeConfig(
            **shared,
            moe_intermediate_size=chance.choice((1, 3, 4)) * sizes["tp"],
            decoder_sparse_step=chance.choice((1, 1, 2)) if shared["num_layers"] > 1 else 1,
            norm_topk_prob=often(0.5),
            router_score=score,
            softmax_after=score == "softmax" and often(0.3),
            router_scale=chance.choice((1.0, 1.7)),
            router_bias_rate=chance.choice((0.0, 0.01)),
            expert_groups=chance.choice(groups) if groups and often(0.4) else None,
            shared_expert_size=shared_size,
            shared_expert_gate=bool(shared_size) and often(0.5),
        )
    over_tp = often(0.5) and sizes["tp"] > 1
    folded = sizes["dp"] * sizes["cp"] * (sizes["tp"] if over_tp else 1)
    ep = chance.choice([1, *(each for each in divisors(experts) if each > 1 and folded % each == 0)] * 2 + [1])
    largest = [each for each in divisors(experts) if folded % each == 0][-1]
    ep = largest if often(0.6) else ep
    kinds = ["all_gather", *(["ulysses"] if kv_heads % (sizes["cp"] * sizes["tp"]) == 0 else [])]
    changes: dict[str, Any] = {
        "sequence": often(0.5) and sizes["tp"] > 1,
        "loss_parallel": often(0.7),
        "context": chance.choice(kinds) if sizes["cp"] > 1 else None,
        "recompute": chance.choice(("none", "selective", "full")),
        "zero": chance.randint(0, 3) if sizes["dp"] * sizes["cp"] > 1 else 0,
        "regather": often(0.7),
        "pipeline": pipeline,
        "experts": ExpertPlan(size=ep, over_tp=over_tp, tokens=chance.choice(("gather", "exchange", None))),
    }
    if ep == 1 and not over_tp:
        changes["experts"] = None
    named = {axis: size for axis, size in sizes.items() if size > 1 or (axis == "dp" and often(0.5))}
    adapters = often(0.25)
    case = Case(
        config=config,
        sizes=named,
        changes=changes,
        rows=microbatches * chance.randint(1, 3),
        length=chance.choice((1, 3, 7, 8)),
        microbatches=microbatches,
        packed=often(0.25),
        frozen=() if adapters or often(0.6) else tuple(chance.sample(FROZEN, 2)),
        targets=chance.choice(TARGETS) if adapters else None,
        records=often(0.3),
    )
    return replace(case, config=replace(config, seq_aux=often(0.3)))


@dataclass(frozen=True, slots=True)
class Trained:
    """The results of a step. weights: after the step."""

    loss: float
    balance: float
    z: Tensor
    load: Tensor
    gradients: dict[str, Tensor]
    norm: float
    issued: Any


def train(case: Case, model: Any) -> list[Trained]:
    """Steps of plain gradient descent."""
    sync, found = GradientSync(model), []
    # As a group: a stage may have no trained parameter, which torch allows in a group alone.
    optimizer = torch.optim.SGD([{"params": [each for each in model.parameters() if each.requires_grad]}], lr=RATE)
    for step in range(STEPS):
        tokens, targets = case.batch(step)
        parts = divide_batch(model, tokens, targets, case.microbatches, case.inputs(step))
        result, issued = observed_microbatches(model, weight_criterion(CRITERION, parts, targets), parts, sync)
        assert result.parts is not None
        gradients = {n: each.grad.clone() for n, each in model.named_parameters() if each.grad is not None}
        found.append(
            Trained(
                result.loss.item(), result.parts.balance.item(), result.parts.z, result.parts.load, gradients,
                clip_gradients(model, 0).item(), issued,
            )
        )  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
    return found


def off(found: float, truth: float) -> bool:
    return not abs(found - truth) <= ALLOWED * max(abs(truth), 1e-3)


def compare(case: Case, truths: list[Trained]) -> list[str]:
    """The differences on this rank from a single process, as lines."""
    mesh, wrong = ProcessMesh.grid(**case.sizes), list[str]()
    model = case.model()
    plan = replace(model.parallel_plan(), **case.changes)
    predicted = None
    if case.records:
        predicted = record(
            case.model(), mesh, plan, batch=(case.rows, case.length), rank=dist.get_rank(),
            microbatches=case.microbatches, criterion=CRITERION, inputs=case.inputs(0),
        )  # fmt: skip
    parallelize(model, mesh, plan)
    for step, (found, truth) in enumerate(zip(train(case, model), truths, strict=True)):
        if predicted is not None and not predicted.predicts(found.issued):
            wrong.append(f"issued\n{found.issued}\nrecorded\n{predicted}")
        for name in ("loss", "balance", "norm"):
            if off(getattr(found, name), getattr(truth, name)):
                wrong.append(f"step {step}: {name} is {getattr(found, name)}, alone {getattr(truth, name)}")
        if not torch.equal(found.load, truth.load):
            wrong.append(f"step {step}: the load is {found.load}, alone {truth.load}")
        if not torch.allclose(found.z, truth.z, rtol=ALLOWED, atol=0):
            wrong.append(f"step {step}: z is {found.z}, alone {truth.z}")
        own = {name for name, each in model.named_parameters() if each.requires_grad}
        if own != found.gradients.keys() or not own <= truth.gradients.keys():
            wrong.append(
                f"step {step}: gradients {own ^ found.gradients.keys()}, and not alone {own - truth.gradients.keys()}"
            )
            continue
        scale = max(each.abs().max().item() for each in truth.gradients.values())
        for name, gradient in found.gradients.items():
            mine, expected = beside(gradient, truth.gradients[name])
            worst = (mine - expected).abs().max().item() if expected.numel() else 0.0
            if not worst <= ALLOWED * (truth.gradients[name].abs().max().item() + 1e-3 * scale):
                wrong.append(f"step {step}: {name} is off by {worst} of {truth.gradients[name].abs().max().item()}")
    return wrong


def compare_each(cases: list[tuple[int, Case, list[Trained]]]) -> list[str]:
    """The differences in all cases. Only the first case records: a group counts under the axis of the first mesh."""
    return [
        f"seed {seed}: {each}\n  {case}"
        for number, (seed, case, truth) in enumerate(cases)
        for each in compare(replace(case, records=case.records and not number), truth)
    ]


def seeds(ranks: int, sample: int, most: int) -> list[Any]:
    """Parameters of the test: a few seeds for the sample, and the remaining ones."""
    found = [pytest.param(ranks, range(sample), id=f"{ranks}-sample")]
    for first in range(sample, most, AT_ONCE):
        some = range(first, min(first + AT_ONCE, most))
        found.append(pytest.param(ranks, some, id=f"{ranks}-from{first}", marks=pytest.mark.exhaustive))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "some"), [*seeds(2, 3, 33), *seeds(4, 3, 63), *seeds(8, 1, 25)])
def test_random_mixtures_under_random_plans_train_as_on_one_process(ranks: int, some: range, pool: Any) -> None:
    cases = [(seed, case, train(case, case.model())) for seed in some for case in [draw(seed, ranks)]]
    assert all(math.isfinite(each.loss) for _, _, truth in cases for each in truth)
    found = pool.run(compare_each, cases, ranks=ranks)
    assert not any(found), "\n".join(dict.fromkeys(said for of_rank in found for said in of_rank))


def give_gradients(model: Any, step: int) -> None:
    """Gives each trained parameter a gradient, the same to the bit on every mesh."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
            gradient = torch.randn(parameter.shape, generator=generator)
            is_sharded = isinstance(parameter, DTensor)
            parameter.grad = distribute(gradient, layout_of(parameter)) if is_sharded else gradient


def muon_of(seed: int) -> OptimizerConfig:
    return OptimizerConfig(name="muon", lr=1e-2, muon=MuonConfig(split_heads=seed % 2 == 0))


def updated_elsewhere(cases: list[tuple[int, Case, Case]], folder: Path) -> list[str]:
    """Two steps of Muon on a mesh, a checkpoint, and a step on a second mesh: the differences from a single process."""
    wrong = []
    for seed, case, after in cases:
        alone = case.model().float()
        optimizer = make_optimizer(alone, muon_of(seed))
        for step in range(3):
            give_gradients(alone, step)
            optimizer.step()
        truth = dict(alone.named_parameters())
        for number, (each, steps) in enumerate(((case, range(2)), (after, range(2, 3)))):
            model = case.model().float()
            parallelize(model, ProcessMesh.grid(**each.sizes), replace(model.parallel_plan(), **each.changes))
            optimizer = make_optimizer(model, muon_of(seed))
            if number:
                load_checkpoint(model, folder / str(seed), optimizer)
            for step in steps:
                give_gradients(model, step)
                optimizer.step()
            if not number:
                save_checkpoint(model, folder / str(seed), optimizer)
        for name, parameter in model.named_parameters():
            mine, expected = beside(parameter.detach(), truth[name].detach())
            worst = (mine - expected).abs().max().item() if expected.numel() else 0.0
            if not worst <= 1e-6:
                wrong.append(f"seed {seed}: {name} is off by {worst} on rank {dist.get_rank()}\n  {case}\n  {after}")
    return wrong


def on_another_mesh(case: Case, seed: int) -> Case:
    """The case on a mesh of data axes of as many processes, under another "ep" and another level of ZeRO."""
    chance, ranks = random.Random(f"another {seed}"), math.prod(case.sizes.values())
    ep = chance.choice([each for each in divisors(case.config.num_experts) if ranks % each == 0])
    changes = {"zero": chance.randint(0, 3), "experts": ExpertPlan(size=ep) if ep > 1 else None}
    return replace(case, sizes={"dp": ranks}, changes=changes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("some", [range(2), pytest.param(range(2, 30), marks=pytest.mark.exhaustive)], ids=str)
def test_muon_updates_experts_on_every_mesh_as_on_one_process(some: range, tmp_path: Path, pool: Any) -> None:
    cases = []
    for seed in some:
        case = replace(draw(seed, 4), frozen=())
        cases.append((seed, case, on_another_mesh(case, seed)))
    found = pool.run(updated_elsewhere, cases, tmp_path, ranks=4)
    assert not any(found), "\n".join(dict.fromkeys(said for of_rank in found for said in of_rank))
