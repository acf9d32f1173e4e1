"""Models whose experts are on a mesh of their own: the loss, every gradient and the norm are those of one process."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh
from weft.models import (
    ExpertPlan,
    Llama,
    LlamaConfig,
    ParallelPlan,
    PipelinePlan,
    RouterLosses,
    clip_gradients,
    lora,
    parallelize,
    record,
)
from weft.models.parallel.experts.placement import experts_mesh
from weft.models.step.criterion import weight_criterion
from weft.models.step.find_gradients import find_gradients
from weft.models.step.forward_backward import divide_batch
from weft.models.train.measure import CollectiveCount
from weft.reshard import GradientSync, check_order, layout_of

from tests.models.cases import ALLOWED, deviation, gradients_off, whole
from tests.models.stepping import observed_microbatches
from tests.models.test_every_mesh import beside
from tests.models.test_experts_parallel import BALANCE, CONFIGS, ROWS, T, Z, batch, inputs_of, make

FAMILIES = {
    "qwen3-moe": replace(CONFIGS["qwen3-moe"], num_experts=8, num_kv_heads=4),
    "mixtral": replace(CONFIGS["mixtral"], num_kv_heads=4),
    "deepseek-router": replace(CONFIGS["deepseek-router"], num_kv_heads=4),
}
MICROBATCHES = 4
CRITERION = RouterLosses(cross_entropy, balance=BALANCE, z=Z)


def count_of(changes: dict[str, Any]) -> int:
    return MICROBATCHES if changes.get("pipeline") else 1


def step(model: Any, config: Any, count: int) -> Any:
    tokens, targets = batch()
    parts = divide_batch(model, tokens, targets, count, {"router": True, **inputs_of(config)})
    weighted = weight_criterion(CRITERION, parts, targets)
    return observed_microbatches(model, weighted, parts, GradientSync(model))


@functools.cache
def alone(family: str, count: int) -> tuple[float, dict[str, Tensor], float]:
    """The loss, the gradients and their norm on one process."""
    model = make(FAMILIES[family])
    found, _ = step(model, FAMILIES[family], count)
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return found.loss.item(), gradients, clip_gradients(model, 0).item()


def plan_of(model: Any, ep: int, changes: dict[str, Any]) -> ParallelPlan:
    """The model's own plan with changes. tokens, over_tp: of the ExpertPlan."""
    experts = ExpertPlan(size=ep, tokens=changes.get("tokens"), over_tp=changes.get("over_tp", False))
    others = {name: value for name, value in changes.items() if name not in ("tokens", "over_tp")}
    return replace(model.parallel_plan(), experts=experts, **others)


def one_case(family: str, sizes: dict[str, int], ep: int, changes: dict[str, Any], truth: Any) -> list[str]:
    mesh, rank, wrong, config = ProcessMesh.grid(**sizes), dist.get_rank(), list[str](), FAMILIES[family]
    loss, gradients, norm = truth
    model = make(config)
    plan, count = plan_of(model, ep, changes), count_of(changes)
    recorded = record(
        model, mesh, plan, batch=(ROWS, T), rank=rank, microbatches=count, criterion=CRITERION, inputs={"router": True}
    )
    parallelize(model, mesh, plan)
    found, issued = step(model, config, count)
    if not recorded.predicts(issued):
        wrong.append(f"issued\n{issued}\nrecorded\n{recorded}")
    if not abs(found.loss.item() - loss) <= 1e-6 * loss:
        wrong.append(f"the loss is {found.loss.item()}, and {loss} on one process")
    largest = {name: each.abs().max().item() for name, each in gradients.items()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        off = deviation(*beside(parameter.grad, gradients[name]), largest[name], max(largest.values()))
        if not off <= ALLOWED:
            wrong.append(f"the gradient of {name} is off by {off} on rank {rank}")
    mine = clip_gradients(model, 0).item()
    if mine != pytest.approx(norm, rel=1e-5):
        wrong.append(f"the norm is {mine}, and {norm} on one process")
    return [f"{family} {sizes} ep={ep} {changes}: {each}" for each in wrong]


def in_stages(schedule: Any) -> PipelinePlan:
    return PipelinePlan(schedule=schedule, microbatches=MICROBATCHES)


CASES: dict[str, tuple[dict[str, int], int, dict[str, Any]]] = {
    "dp2-ep2": ({"dp": 2}, 2, {}),
    "dp4-ep2": ({"dp": 4}, 2, {}),
    "cp2-ep2": ({"dp": 1, "cp": 2}, 2, {"context": "all_gather"}),
    "dp2-cp2-ep4": ({"dp": 2, "cp": 2}, 4, {"context": "ulysses"}),
    "dp2-tp2-ep2": ({"dp": 2, "tp": 2}, 2, {}),
    "dp2-tp2-ep2-sequence": ({"dp": 2, "tp": 2}, 2, {"sequence": True}),
    "dp2-tp2-ep4": ({"dp": 2, "tp": 2}, 4, {"over_tp": True}),
    "dp2-tp2-ep4-sequence": ({"dp": 2, "tp": 2}, 4, {"over_tp": True, "sequence": True}),
    "dp2-tp2-ep2-whole": ({"dp": 2, "tp": 2}, 2, {"over_tp": True}),
    "dp4-ep2-zero1": ({"dp": 4}, 2, {"zero": 1}),
    "dp4-ep2-zero2": ({"dp": 4}, 2, {"zero": 2}),
    "dp4-ep2-zero3": ({"dp": 4}, 2, {"zero": 3}),
    "dp4-tp2-ep2-zero3": ({"dp": 4, "tp": 2}, 2, {"zero": 3, "sequence": True}),
    "dp2-ep2-full": ({"dp": 2}, 2, {"recompute": "full"}),
    "dp2-ep2-selective": ({"dp": 2}, 2, {"recompute": "selective"}),
    "dp4-ep2-zero3-full": ({"dp": 4}, 2, {"zero": 3, "recompute": "full"}),
    "pp2-dp2-ep2-1f1b": ({"pp": 2, "dp": 2}, 2, {"pipeline": in_stages("1f1b")}),
    "pp2-dp2-ep2-interleaved": ({"pp": 2, "dp": 2}, 2, {"pipeline": in_stages("interleaved")}),
    "pp2-dp2-ep2-zero-bubble": ({"pp": 2, "dp": 2}, 2, {"pipeline": in_stages("zero_bubble")}),
    "pp2-dp4-ep2-zero3": ({"pp": 2, "dp": 4}, 2, {"pipeline": in_stages("1f1b"), "zero": 3}),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", ["gather", "exchange"])
@pytest.mark.parametrize("case", CASES)
def test_anchors_33_34_35_and_36_step_of_one_process(case: str, tokens: str, family: str, pool: Any) -> None:
    sizes, ep, changes = CASES[case]
    truth = alone(family, count_of(changes))
    found = pool.run(one_case, family, sizes, ep, {**changes, "tokens": tokens}, truth, ranks=math.prod(sizes.values()))
    assert not any(found), "\n".join(said for of_rank in found for said in of_rank)


def in_order(case: str) -> list[str]:
    sizes, ep, changes = CASES[case]
    with check_order():
        return one_case(
            "qwen3-moe", sizes, ep, {**changes, "tokens": "exchange"}, alone("qwen3-moe", count_of(changes))
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["pp2-dp2-ep2-zero-bubble", "pp2-dp2-ep2-interleaved"])
def test_stages_exchange_tokens_in_one_order_on_all_ranks(case: str, pool: Any) -> None:
    assert not any(pool.run(in_order, case, ranks=4))


# Each token goes to all experts: otherwise the rounding of bfloat16 decides where a token near two experts goes. The
# sizes give a token's hidden state, its coefficients and its choices different numbers of bytes.
EVERY_EXPERT = replace(FAMILIES["qwen3-moe"], hidden_size=32, num_experts=4, experts_per_token=4)


def in_bfloat16(ep: int | None) -> tuple[float, dict[str, Tensor], list[Any]]:
    config = EVERY_EXPERT
    model = make(config)
    if ep is not None:
        parallelize(model, ProcessMesh.grid(dp=2), plan_of(model, ep, {"tokens": "gather"}))
    parts = divide_batch(model, *batch(), 1, {"router": True})
    sync = GradientSync(model)
    with CollectiveCount() as count:
        found = find_gradients(
            model, CRITERION, parts, sync, call_context=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
        )
    gradients = {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    return found.loss.item(), gradients, [each for each in count.take_each() if each.axes == ("ep",)]


@pytest.mark.exhaustive
def test_tokens_move_in_the_dtype_of_autocast(pool: Any) -> None:
    loss, gradients, _ = in_bfloat16(None)
    rows = ROWS // 2 * T  # received from the other rank
    for found, own, moved in pool.run(in_bfloat16, 2, ranks=2):
        assert found == pytest.approx(loss, rel=1e-2)
        for name, each in own.items():
            assert (each - gradients[name]).abs().max() <= 0.1 * gradients[name].abs().max(), name
        hidden = EVERY_EXPERT.hidden_size
        assert sum(each.nbytes == rows * hidden * 2 for each in moved) == 4 * len(EVERY_EXPERT.sparse_layers)


def adapted(ep: int | None) -> dict[str, Tensor]:
    model = make(FAMILIES["qwen3-moe"])
    lora(model, 2, 4.0, ["layers.*.self_attn.q_proj"])
    for name, each in model.named_parameters():
        if name.endswith("lora.B"):
            torch.nn.init.normal_(each, generator=torch.Generator().manual_seed(len(name)))
    if ep is not None:
        parallelize(model, ProcessMesh.grid(dp=2), plan_of(model, ep, {"tokens": "exchange"}))
    step(model, FAMILIES["qwen3-moe"], 1)
    return {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.exhaustive
def test_adapters_train_beside_frozen_experts(pool: Any) -> None:
    truth = adapted(None)
    for found in pool.run(adapted, 2, ranks=2):
        assert found.keys() == truth.keys()
        assert all(name.partition(".lora.")[2] for name in found)
        assert not gradients_off(found, truth)


@pytest.mark.parametrize(
    ("mesh", "plan", "expected"),
    [
        pytest.param(ProcessMesh.grid(dp=8), ExpertPlan(size=4), ProcessMesh.grid(dp=2, ep=4), id="dp"),
        pytest.param(ProcessMesh.grid(dp=2, cp=4), ExpertPlan(size=2), ProcessMesh.grid(dp=4, ep=2), id="inside-cp"),
        pytest.param(
            ProcessMesh.grid(dp=4, tp=2), ExpertPlan(size=2), ProcessMesh.grid(dp=2, ep=2, tp=2), id="beside-tp"
        ),
        pytest.param(
            ProcessMesh.grid(dp=4, tp=2), ExpertPlan(size=4, over_tp=True), ProcessMesh.grid(dp=2, ep=4), id="over-tp"
        ),
        pytest.param(
            ProcessMesh.grid(tp=2, dp_replica=2, dp_shard=2),
            ExpertPlan(size=2),
            ProcessMesh([[[0, 4], [1, 5]], [[2, 6], [3, 7]]], ["dp", "ep", "tp"]),
            id="parts-of-dp",
        ),
    ],
)
def test_the_mesh_of_experts_follows_from_the_models(
    mesh: ProcessMesh, plan: ExpertPlan, expected: ProcessMesh
) -> None:
    assert experts_mesh(mesh, plan) == expected


def layouts(sizes: dict[str, int], ep: int, changes: dict[str, Any]) -> dict[str, Layout]:
    model = make(FAMILIES["qwen3-moe"])
    parallelize(model, ProcessMesh.grid(**sizes), plan_of(model, ep, changes))
    return {name: layout_of(each) for name, each in model.named_parameters() if ".1.mlp." in name}


@pytest.mark.parametrize(
    ("sizes", "changes", "mesh", "gate_proj", "down_proj"),
    [
        pytest.param({"dp": 4}, {}, {"dp": 2, "ep": 2}, "ep: S(0)", "ep: S(0)", id="dp"),
        pytest.param({"dp": 4}, {"zero": 1}, {"dp": 2, "ep": 2}, "ep: S(0), dp: S(0)", "ep: S(0), dp: S(0)", id="zero"),
        pytest.param(
            {"dp": 2, "tp": 2}, {}, {"dp": 1, "ep": 2, "tp": 2}, "ep: S(0), tp: S(1)", "ep: S(0), tp: S(2)", id="tp"
        ),
        pytest.param({"dp": 2, "tp": 2}, {"over_tp": True}, {"dp": 2, "ep": 2}, "ep: S(0)", "ep: S(0)", id="over-tp"),
    ],
)
def test_experts_are_sharded_over_a_mesh_of_their_own(
    sizes: dict[str, int], changes: Any, mesh: dict[str, int], gate_proj: str, down_proj: str, pool: Any
) -> None:
    found = pool.run(layouts, sizes, 2, changes, ranks=4)[0]
    experts = ProcessMesh.grid(**mesh)
    assert found["layers.1.mlp.experts.gate_proj"] == Layout(experts, gate_proj)
    assert found["layers.1.mlp.experts.down_proj"] == Layout(experts, down_proj)
    assert found["layers.1.mlp.gate.weight"].mesh == ProcessMesh.grid(**sizes)


@pytest.mark.parametrize(
    ("sizes", "plan", "message"),
    [
        pytest.param(
            {"dp": 6},
            ExpertPlan(size=3),
            "ep=3 does not divide the 8 experts of .*; sizes that do: 1, 2, 4, 8",
            id="experts",
        ),
        pytest.param(
            {"dp": 3, "cp": 2},
            ExpertPlan(size=4),
            "ep=4 does not divide the 6 ranks of dp=3 x cp=2, .*; sizes that do: 1, 2, 3, 6",
            id="ranks",
        ),
        pytest.param({"tp": 2}, ExpertPlan(size=2), "ep=2 does not divide the 1 rank of no axis of data", id="no-data"),
        pytest.param({"pp": 2}, ExpertPlan(size=2), "ep=2 does not divide the 1 rank of dp=1", id="stages"),
        pytest.param({"dp": 1}, ExpertPlan(size=2), "ep=2 does not divide the 1 rank of dp=1", id="one-process"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_without_a_process_group(
    sizes: dict[str, int], plan: ExpertPlan, message: str
) -> None:
    assert not dist.is_initialized()
    model = make(FAMILIES["qwen3-moe"])
    pipeline = PipelinePlan(microbatches=1) if "pp" in sizes else None
    context = "all_gather" if "cp" in sizes else None
    laid_out = replace(model.parallel_plan(), experts=plan, pipeline=pipeline, context=context)
    with pytest.raises(ValueError, match=message):
        parallelize(model, ProcessMesh.grid(**sizes), laid_out)


def test_a_mesh_with_an_axis_ep_names_the_plan() -> None:
    model = make(FAMILIES["qwen3-moe"])
    with pytest.raises(ValueError, match=r"give ParallelPlan\(experts=ExpertPlan\(size=2\)\)"):
        parallelize(model, ProcessMesh.grid(dp=2, ep=2), model.parallel_plan())


def test_a_model_without_experts_refuses_a_plan_with_experts() -> None:
    model = Llama(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="gives no module the style ExpertParallel"):
        parallelize(model, ProcessMesh.grid(dp=2), replace(model.parallel_plan(), experts=ExpertPlan(size=2)))


@pytest.mark.parametrize("wrong", [{"size": 0}, {"size": 2.0}, {"size": True}, {"tokens": "send"}])
def test_a_wrong_expert_plan_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ExpertPlan: "):
        ExpertPlan(**wrong)
