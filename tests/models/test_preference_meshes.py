"""Steps of preference tuning on meshes: token losses, sums by document, DPO and KTO, all as on one process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models import (
    DPOCriterion,
    GPTConfig,
    KTOCriterion,
    LlamaConfig,
    ParallelPlan,
    PipelinePlan,
    PreferenceTargets,
    QwenMoeConfig,
    RouterLosses,
    initialize,
    kl_of,
    lay_out_batch,
    log_probabilities,
    lora,
    parallelize,
)
from weft.models.families import make_model
from weft.models.parallel.parallelize import mesh_and_plan_of
from weft.models.parallel.pipeline.step import Microbatch
from weft.models.step.find_gradients import find_gradients
from weft.models.step.preference import log_probabilities_of
from weft.reshard import GradientSync

from tests.models.cases import gradients_off, whole
from tests.support.collectives import Collectives

SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4, "max_seq_len": 16
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, num_kv_heads=4),
    "tied": LlamaConfig(**SIZES, num_kv_heads=4, tie_embeddings=True),
    "adapted": LlamaConfig(**SIZES, num_kv_heads=4),
    "gpt": GPTConfig(**{k: v for k, v in SIZES.items() if k != "intermediate_size"}),
    "experts": QwenMoeConfig(**SIZES, num_kv_heads=4, num_experts=4, experts_per_token=2, moe_intermediate_size=8),
}
R, T, D, COUNT = 6, 13, 4, 2  # rows of the batch, tokens, documents in a row, microbatches
LENGTHS = [(3, 4, 2, 3), (5, 4), (2, 2, 4, 5), (6, 7), (4, 2, 3, 3), (2, 9)]  # of the documents of each row
BETA, KL_BETA, BALANCE = 0.3, 0.4, 0.01


def make(name: str, seed: int) -> Any:
    config = CONFIGS[name]
    model: Any = make_model(replace(config, num_layers=3) if name == "tied" else config)
    initialize(model, seed)
    if name == "adapted":
        lora(model, 2, 4.0, ["lm_head", "layers.*.self_attn.q_proj"])
        with torch.no_grad():
            for n, parameter in model.named_parameters():
                if n.endswith("lora.B"):
                    parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.2)
    return model


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Rows of 2 or 4 documents and padding; the first target of each document, its prompt, is not learned."""
    tokens = torch.randint(0, 31, (R, T), generator=torch.Generator().manual_seed(seed))
    documents, positions = torch.zeros(R, T, dtype=torch.int64), torch.zeros(R, T, dtype=torch.int64)
    targets = torch.full((R, T), -100)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate((*lengths, T - sum(lengths))):
            stop = start + length
            documents[row, start:stop] = number
            positions[row, start:stop] = torch.arange(length)
            if number < len(lengths):
                targets[row, start + (length > 2) : stop - 1] = tokens[row, start + 1 + (length > 2) : stop]
            start = stop
    return {"tokens": tokens, "targets": targets, "positions": positions, "documents": documents}


def valid_documents() -> Tensor:
    """[R, D]: whether the row has the document."""
    return torch.tensor([[number < len(lengths) for number in range(D)] for lengths in LENGTHS])


def labels() -> Tensor:
    return torch.rand(R, D, generator=torch.Generator().manual_seed(5)) < 0.5


def microbatches(model: Any, values: dict[str, Tensor], inputs: dict[str, Any], pairs: bool) -> list[Microbatch]:
    """The batch laid out for the model in `COUNT` microbatches, with valid examples and labels."""
    found = []
    mesh, plan = mesh_and_plan_of(model) or (ProcessMesh.grid(dp=1), ParallelPlan())  # none on a mesh of one process
    rows = Layout(mesh, {"dp": Shard(0)} if "dp" in mesh.axis_names else {})
    for number in range(COUNT):
        first, size = number * R // COUNT, R // COUNT
        part = {name: each[first : first + size] for name, each in values.items()}
        laid = lay_out_batch(mesh, plan, numbers=part["documents"], **part)
        own = rows.local_slices((size, T), dist.get_rank())[0] if mesh.size > 1 else slice(0, size)
        own_rows = torch.arange(first + own.start, first + own.stop)
        valid = valid_documents()[own_rows]
        assert laid.targets is not None and laid.numbers is not None
        targets = PreferenceTargets(
            targets=laid.targets,
            numbers=laid.numbers,
            rows=own_rows,
            valid=valid[:, ::2] if pairs else valid,
            desirable=None if pairs else labels()[own_rows],
        )
        kwargs = {"positions": laid.positions, "documents": laid.documents, "targets": laid.targets, **inputs}
        found.append(Microbatch(args=(laid.tokens,), kwargs=kwargs, targets=targets))
    return found


def on_mesh(name: str, seed: int, axes: dict[str, Any], plan: dict[str, Any], pipeline: dict[str, Any]) -> Any:
    model = make(name, seed)
    if pipeline:
        plan = {**plan, "pipeline": PipelinePlan(microbatches=COUNT, **pipeline)}
    return parallelize(model, ProcessMesh.grid(**axes), replace(model.parallel_plan(), **plan))


def preference_step(
    name: str, kind: str, axes: dict[str, Any], plan: dict[str, Any], pipeline: dict[str, Any], reference_axes: Any
) -> dict[str, Any]:
    """A step's loss, sums, gradients of this rank's parameters, and log-probabilities of both models."""
    policy, of_reference = on_mesh(name, 1, axes, plan, pipeline), on_mesh(name, 2, reference_axes, {}, {})
    pairs, inputs = kind != "kto", {"router": True} if name == "experts" else {}
    values = batch()
    with Collectives() as seen:
        fixed = log_probabilities(of_reference, microbatches(of_reference, values, {}, pairs), D, R)
    own = microbatches(policy, values, {}, pairs)
    found = {"fixed": fixed, "policy": log_probabilities(policy, own, D, R), "collectives": seen.kinds}
    if kind == "kto":
        mismatched = batch(seed=9)
        kl = kl_of(
            log_probabilities(policy, microbatches(policy, mismatched, {}, pairs), D, R),
            log_probabilities(of_reference, microbatches(of_reference, mismatched, {}, pairs), D, R),
            valid_documents(),
        )
        judged = labels()[valid_documents()]
        criterion: Any = KTOCriterion(
            num_documents=D,
            num_desirable=int(judged.sum()),
            num_undesirable=int((~judged).sum()),
            kl=kl,
            beta=KL_BETA,
            desirable_weight=1.5,
        )
    else:
        denominator = int(valid_documents()[:, ::2].sum())
        options: dict[str, Any] = {"loss": "ipo"} if kind == "ipo" else {"label_smoothing": 0.1}
        criterion = DPOCriterion(num_documents=D, denominator=denominator, beta=BETA, **options)
    if name == "experts":
        criterion = RouterLosses(criterion, balance=BALANCE, microbatches=COUNT)
    own = [replace(each, targets=each.targets.with_reference(fixed), kwargs=each.kwargs | inputs) for each in own]
    result = find_gradients(policy, criterion, own, GradientSync(policy), clip_norm=0.0)
    return found | {
        "loss": result.loss,
        "sums": result.sums,
        "balance": None if result.parts is None else result.parts.balance,
        "norm": result.grad_norm,
        "gradients": {n: whole(p.grad) for n, p in policy.named_parameters() if p.grad is not None},
    }


def sums_alone(model: Any, values: dict[str, Tensor], **inputs: Any) -> tuple[Tensor, Any]:
    """Log-probabilities [R, D] of the documents by torch alone, from logits of one process; and the statistics."""
    output = model(values["tokens"], positions=values["positions"], documents=values["documents"], **inputs)
    logits, statistics = output if inputs else (output, None)
    targets = values["targets"]
    each = F.log_softmax(logits, -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)
    return torch.stack([(each * (values["documents"] == d)).sum(-1) for d in range(D)], -1), statistics


def step_alone(name: str, kind: str) -> dict[str, Any]:
    """`preference_step` on one process, with formulas of its own."""
    policy, reference, values, valid = make(name, 1), make(name, 2), batch(), valid_documents()
    with torch.no_grad():
        fixed, _ = sums_alone(reference, values)
    own, _ = sums_alone(policy, values)
    found = {"fixed": fixed, "policy": own.detach()}
    if kind == "kto":
        with torch.no_grad():
            mismatched = batch(seed=9)
            ratios = sums_alone(policy, mismatched)[0] - sums_alone(reference, mismatched)[0]
            kl = ratios[valid].mean().clamp(min=0)
        excess, desirable = (own - fixed - kl)[valid], labels()[valid]
        losses = torch.where(
            desirable, 1.5 * (1 - torch.sigmoid(KL_BETA * excess)), 1 - torch.sigmoid(-KL_BETA * excess)
        )
        rewards = KL_BETA * (excess + kl).detach()
        sums = torch.stack([rewards[desirable].mean(), rewards[~desirable].mean(), kl])
    else:
        ratios = own - fixed
        if kind == "ipo":
            counts = [((values["documents"] == d) & (values["targets"] != -100)).sum(-1) for d in range(D)]
            ratios = ratios / torch.stack(counts, -1).clamp(min=1)
        chosen, rejected = ratios[:, ::2][valid[:, ::2]], ratios[:, 1::2][valid[:, ::2]]
        margin = chosen - rejected
        if kind == "ipo":
            losses = (margin - 1 / (2 * BETA)) ** 2
        else:
            losses = -0.9 * F.logsigmoid(BETA * margin) - 0.1 * F.logsigmoid(-BETA * margin)
        each = (BETA * chosen, BETA * rejected, BETA * margin, (margin > 0).float())
        sums = torch.stack([x.detach().mean() for x in each])
    loss, balance = losses.mean(), None
    if name == "experts":  # the balance loss is a mean over the microbatches
        parts = [{n: x[i : i + R // COUNT] for n, x in values.items()} for i in range(0, R, R // COUNT)]
        routers = RouterLosses(lambda output, targets: output.sum() * 0, balance=1.0)
        each_balance = [routers(sums_with_statistics(policy, part), part["targets"]).loss for part in parts]
        mean = torch.stack(each_balance).mean()
        loss, balance = loss + BALANCE * mean, mean.detach()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    norm = torch.stack([each.norm() for each in gradients.values()]).norm()
    return found | {"loss": loss.detach(), "sums": sums, "balance": balance, "gradients": gradients, "norm": norm}


def sums_with_statistics(model: Any, values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return sums_alone(model, values, router=True)


Case = tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]
CONTEXT = {"context": "all_gather"}
CASES: dict[str, Case] = {
    "tensor": ("llama", "dpo", {"tp": 2}, {"loss_parallel": False}, {}, {"dp": 2}),
    "data": ("gpt", "kto", {"dp": 2}, {}, {}, {"tp": 2}),
    "stages": ("tied", "dpo", {"pp": 2}, {}, {"schedule": "1f1b"}, {"dp": 2}),
    "context": ("llama", "ipo", {"cp": 2}, CONTEXT, {}, {"dp": 1, "first_rank": 1}),
    "adapted": ("adapted", "dpo", {"tp": 2}, {"sequence": True}, {}, {"tp": 2}),
    "experts": ("experts", "dpo", {"dp": 2}, {}, {}, {"tp": 2}),
    "apart": ("llama", "dpo", {"dp": 2}, {}, {}, {"tp": 2, "first_rank": 2}),
    "tensor-zero3": ("llama", "kto", {"dp": 2, "tp": 2}, {"sequence": True, "zero": 3}, {}, {"dp": 2, "first_rank": 2}),
    "context-zero1": ("tied", "dpo", {"dp": 2, "cp": 2}, {**CONTEXT, "zero": 1}, {}, {"tp": 4}),
    "context-tensor": ("gpt", "ipo", {"cp": 2, "tp": 2}, {**CONTEXT, "sequence": True}, {}, {"dp": 4}),
    "ulysses": ("llama", "kto", {"cp": 2, "dp": 2}, {"context": "ulysses", "zero": 2}, {}, {"dp": 2, "tp": 2}),
    "stages-zero3": ("llama", "dpo", {"pp": 2, "dp": 2}, {"zero": 3}, {"schedule": "zero_bubble"}, {"dp": 4}),
    "stages-experts": ("experts", "kto", {"pp": 2, "tp": 2}, {"sequence": True}, {"schedule": "1f1b"}, {"dp": 4}),
    "stages-context": ("llama", "kto", {"pp": 2, "cp": 2}, CONTEXT, {"schedule": "gpipe"}, {"dp": 2, "first_rank": 1}),
    "stages-adapted": ("adapted", "dpo", {"pp": 2, "tp": 2}, {}, {"schedule": "1f1b"}, {"dp": 4}),
    "recompute": ("adapted", "kto", {"dp": 2, "tp": 2}, {"recompute": "full", "zero": 2}, {}, {"dp": 4}),
    "all": ("llama", "dpo", {"dp": 2, "cp": 2, "tp": 2}, {**CONTEXT, "sequence": True, "zero": 3}, {}, {"dp": 8}),
    "all-staged": (
        "tied", "kto", {"pp": 2, "dp": 2, "cp": 2}, {**CONTEXT, "zero": 1}, {"schedule": "1f1b"}, {"dp": 2, "tp": 4}
    ),
}  # fmt: skip


def ranks_in(axes: dict[str, int]) -> int:
    """The end of the ranks of a mesh."""
    first = axes.get("first_rank", 0)
    return first + math.prod(size for axis, size in axes.items() if axis != "first_rank")


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_one_process(name: str, pool: Any) -> None:
    case = CASES[name]
    wanted, close = step_alone(*case[:2]), torch.testing.assert_close
    trained: set[str] = set()
    ranks = max(ranks_in(case[2]), ranks_in(case[5]))
    for rank, found in enumerate(pool.run(preference_step, *case, ranks=ranks)):
        for each in ("fixed", "policy"):
            close(found[each], wanted[each], rtol=1e-6, atol=2e-6)
        if rank >= ranks_in(case[2]):  # outside the policy's mesh
            assert found["sums"] is None
            continue
        close(found["loss"], wanted["loss"], rtol=1e-6, atol=1e-6)
        close(found["sums"], wanted["sums"], rtol=1e-5, atol=2e-6)
        close(found["norm"], wanted["norm"], rtol=1e-5, atol=0)
        if wanted["balance"] is not None:
            close(found["balance"], wanted["balance"], rtol=1e-5, atol=0)
        truth = {n: each for n, each in wanted["gradients"].items() if n in found["gradients"]}
        assert not gradients_off(found["gradients"], truth)
        trained |= truth.keys()
    assert trained == wanted["gradients"].keys()


def communication(axes: dict[str, Any], plan: dict[str, Any]) -> list[list[str]]:
    """The collectives of a forward with token losses, of log-probabilities from them, and of the result's sum."""
    policy = on_mesh("llama", 1, axes, plan, {})
    (first, *_) = microbatches(policy, batch(), {}, True)
    with Collectives() as forward, torch.no_grad():
        losses = policy(*first.args, **first.kwargs)
    with Collectives() as sums:
        log_probabilities_of(losses, first.targets, D)
    with Collectives() as both:
        log_probabilities(policy, [first], D, R)
    return [forward.kinds, sums.kinds, both.kinds[len(forward.kinds) + len(sums.kinds) :]]


@pytest.mark.parametrize(
    ("axes", "plan", "of_sums"),
    [
        pytest.param({"dp": 2}, {}, [], id="rows"),
        pytest.param({"tp": 2}, {"sequence": True}, [], id="sequence"),
        pytest.param({"cp": 2}, CONTEXT, ["all-reduce"], id="context"),
    ],
)
def test_sums_communicate_over_the_axes_that_shard_tokens(
    axes: dict[str, Any], plan: dict[str, Any], of_sums: list[str], pool: Any
) -> None:
    for _, sums, of_batch in pool.run(communication, axes, plan, ranks=2):
        assert sums == of_sums
        assert of_batch == ["all-reduce"]


def test_without_processes_log_probabilities_are_those_of_the_model() -> None:
    model, values = make("llama", 1), batch()
    targets = PreferenceTargets(
        targets=values["targets"], numbers=values["documents"], rows=torch.arange(R), valid=valid_documents()[:, ::2]
    )
    kwargs = {name: values[name] for name in ("positions", "documents")}
    logits = Microbatch(args=(values["tokens"],), kwargs=kwargs, targets=targets)
    losses = replace(logits, kwargs={**kwargs, "targets": values["targets"]})
    wanted, _ = sums_alone(model, values)
    for each in (logits, losses):
        torch.testing.assert_close(log_probabilities(model, [each], D, R), wanted.detach(), rtol=1e-6, atol=2e-6)
    assert not log_probabilities(model, [losses], D, R).requires_grad


def test_wrong_targets_and_outputs_are_refused() -> None:
    values, valid = batch(), valid_documents()
    targets = PreferenceTargets(
        targets=values["targets"], numbers=values["documents"], rows=torch.arange(R), valid=valid[:, ::2]
    )
    losses, dpo = torch.zeros(R, T), DPOCriterion(num_documents=D, denominator=9)
    kto = KTOCriterion(num_documents=D, num_desirable=3, num_undesirable=3, kl=0.0)
    fixed = targets.with_reference(torch.zeros(R, D))
    with pytest.raises(ValueError, match=r"PreferenceTargets\.reference is None; give \(6, 4\)"):
        dpo(losses, targets)
    with pytest.raises(ValueError, match=r"PreferenceTargets\.reference is of shape \(6, 3\); give \(6, 4\)"):
        dpo(losses, targets.with_reference(torch.zeros(R, 3)))
    with pytest.raises(ValueError, match=r"PreferenceTargets\.valid is of shape \(6, 4\); give \(6, 2\)"):
        dpo(losses, replace(fixed, valid=valid))
    with pytest.raises(ValueError, match=r"PreferenceTargets\.desirable is None; give \(6, 4\)"):
        kto(losses, replace(fixed, valid=valid))
    with pytest.raises(ValueError, match=r"token losses \(6, 13\) or logits \(6, 13, 'V'\), got \(6, 12\)"):
        dpo(losses[:, 1:], fixed)
    with pytest.raises(ValueError, match="takes PreferenceTargets, got Tensor"):
        dpo(losses, values["targets"])  # type: ignore[arg-type]
