"""Low-rank adapters of experts on every mesh: loss, gradients and norm of one process; saved, read and merged."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.mesh import Layout, ProcessMesh
from weft.models import (
    ExpertPlan,
    clip_gradients,
    from_pretrained,
    load_lora,
    lora,
    merge_lora,
    parallelize,
    record,
    save_lora,
    save_pretrained,
)
from weft.reshard import layout_of

from tests.models.cases import gradients_off, whole
from tests.models.test_experts_axis import CRITERION, FAMILIES, ROWS, T, count_of, in_stages, step
from tests.models.test_experts_axis import plan_of as plan_with_experts
from tests.models.test_experts_parallel import make
from tests.models.test_lora_experts import ALL, ALPHA, CONFIG, EXPERTS, RANK, adapted, gradients, with_values

CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {}),
    "tp2": ({"tp": 2}, {}),
    "tp2-sequence": ({"tp": 2}, {"sequence": True}),
    "cp2": ({"cp": 2}, {"context": "all_gather"}),
    "dp2-zero3": ({"dp": 2}, {"zero": 3}),
    "dp2-full": ({"dp": 2}, {"recompute": "full"}),
    "pp2-zero-bubble": ({"pp": 2}, {"pipeline": in_stages("zero_bubble")}),
    "dp2-ep2-exchange": ({"dp": 2}, {"ep": 2, "tokens": "exchange"}),
    "dp4-ep2-gather": ({"dp": 4}, {"ep": 2, "tokens": "gather"}),
    "dp4-ep2-exchange": ({"dp": 4}, {"ep": 2, "tokens": "exchange"}),
    "dp4-ep2-zero3": ({"dp": 4}, {"ep": 2, "tokens": "exchange", "zero": 3}),
    "dp2-tp2-ep2": ({"dp": 2, "tp": 2}, {"ep": 2, "tokens": "exchange", "sequence": True}),
    "dp2-tp2-ep4": ({"dp": 2, "tp": 2}, {"ep": 4, "over_tp": True, "tokens": "gather"}),
    "dp2-ep2-selective": ({"dp": 2}, {"ep": 2, "tokens": "exchange", "recompute": "selective"}),
    "pp2-dp2-ep2": ({"pp": 2, "dp": 2}, {"ep": 2, "tokens": "exchange", "pipeline": in_stages("1f1b")}),
}


def plan_of(model: Any, changes: dict[str, Any]) -> Any:
    changes = dict(changes)
    ep = changes.pop("ep", None)
    return replace(model.parallel_plan(), **changes) if ep is None else plan_with_experts(model, ep, changes)


def stepped(
    targets: list[str], family: str, case: str | None, after: bool, count: int, records: bool
) -> dict[str, Any]:
    model = make(FAMILIES[family])
    sizes, changes = ({}, {}) if case is None else CASES[case]
    recorded = None
    if sizes and records:
        recorded = record(
            lora(make(FAMILIES[family]), RANK, ALPHA, targets),
            ProcessMesh.grid(**sizes),
            plan_of(model, changes),
            batch=(ROWS, T),
            rank=torch.distributed.get_rank(),
            microbatches=count,
            criterion=CRITERION,
            inputs={"router": True},
        )
    if sizes and after:
        parallelize(model, ProcessMesh.grid(**sizes), plan_of(model, changes))
    lora(model, RANK, ALPHA, targets)
    if sizes and not after:
        parallelize(model, ProcessMesh.grid(**sizes), plan_of(model, changes))
    with_values(model)
    found, issued = step(model, FAMILIES[family], count)
    return {
        "loss": found.loss.item(),
        "gradients": gradients(model),
        "norm": clip_gradients(model, 0).item(),
        "trained": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "recorded": None if recorded is None or recorded.predicts(issued) else f"{recorded}\n{issued}",
    }


def check_as_alone(targets: list[str], family: str, case: str, after: bool, pool: Any, records: bool = True) -> None:
    sizes, changes = CASES[case]
    count = count_of(changes)
    alone = stepped(targets, family, None, False, count, False)
    compared: set[str] = set()
    found = pool.run(stepped, targets, family, case, after, count, records, ranks=math.prod(sizes.values()))
    for each in found:
        assert each["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert each["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert not gradients_off(each["gradients"], {n: alone["gradients"][n] for n in each["gradients"]})
        assert each["recorded"] is None, each["recorded"]
        compared |= each["gradients"].keys()
        if "pp" not in sizes:
            assert each["trained"] == alone["trained"]
    assert compared == alone["gradients"].keys()


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_norm_are_those_of_one_process(case: str, pool: Any) -> None:
    check_as_alone(EXPERTS, "qwen3-moe", case, False, pool)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["tp2", "dp2-ep2-exchange", "dp4-ep2-zero3"])
def test_adapters_may_be_added_after_parallelize(case: str, pool: Any) -> None:
    check_as_alone(ALL, "mixtral", case, True, pool, records=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        pytest.param({"dp": 2, "tp": 2}, {"sequence": True}, id="tp"),
        pytest.param({"dp": 4, "tp": 2}, {"ep": 2, "tokens": "gather"}, id="ep"),
    ],
)
def test_adapters_add_no_collective_to_forward(sizes: dict[str, int], changes: dict[str, Any]) -> None:
    mesh = ProcessMesh.grid(**sizes)
    bare, with_adapters = (
        record(model, mesh, plan_of(model, changes), batch=(ROWS, T))
        for model in (make(CONFIG), lora(make(CONFIG), RANK, ALPHA, EXPERTS))
    )
    assert with_adapters.select(phase="forward") == bare.select(phase="forward")
    # Gradients of adapters alone are reduced; those of A beside gate_proj over "tp", too.
    assert with_adapters.select(phase="gradients").nbytes < bare.select(phase="gradients").nbytes / 2


def layouts() -> dict[str, Layout]:
    model = lora(make(CONFIG), RANK, ALPHA, EXPERTS)
    parallelize(model, ProcessMesh.grid(dp=2, tp=2), plan_of(model, {"ep": 2}))
    return {name: layout_of(each) for name, each in model.named_parameters() if ".1.mlp.experts.lora." in name}


def test_a_and_b_are_sharded_like_the_experts_inputs_and_outputs(pool: Any) -> None:
    experts = ProcessMesh.grid(dp=1, ep=2, tp=2)
    for found in pool.run(layouts, ranks=4):
        own = {name.partition(".lora.")[2]: layout for name, layout in found.items()}
        for name in ("gate_proj", "up_proj"):
            assert own[f"{name}.A"] == Layout(experts, "ep: S(0)")
            assert own[f"{name}.B"] == Layout(experts, "ep: S(0), tp: S(1)")
        assert own["down_proj.A"] == Layout(experts, "ep: S(0), tp: S(2)")
        assert own["down_proj.B"] == Layout(experts, "ep: S(0)")


def save(folder: Path) -> None:
    model = lora(make(CONFIG), RANK, ALPHA, ALL)
    parallelize(model, ProcessMesh.grid(dp=4), replace(model.parallel_plan(), experts=ExpertPlan(size=4), zero=3))
    with_values(model)
    save_lora(model, folder / "adapters")
    save_pretrained(model, folder / "written")


def load(folder: Path, ep: int, zero: int) -> dict[str, Tensor]:
    model = make(CONFIG)
    plan = replace(model.parallel_plan(), experts=ExpertPlan(size=ep), zero=zero)
    if zero:
        parallelize(load_lora(model, folder / "adapters"), ProcessMesh.grid(dp=2, tp=2), plan)
    else:
        load_lora(parallelize(model, ProcessMesh.grid(dp=2, tp=2), plan), folder / "adapters")
    unmerged = {name: whole(each) for name, each in model.named_parameters() if ".lora." in name}
    return unmerged | {name: whole(each) for name, each in merge_lora(model).named_parameters()}


@pytest.mark.exhaustive
def test_saved_under_one_ep_read_under_another_and_merged(tmp_path: Path, pool: Any) -> None:
    pool.run(save, tmp_path, ranks=4)
    expected = adapted(ALL)
    adapters = {name: each.clone() for name, each in expected.named_parameters() if ".lora." in name}
    merged = dict(merge_lora(expected).named_parameters())
    written = dict(from_pretrained(tmp_path / "written").named_parameters())
    for name, each in merged.items():
        torch.testing.assert_close(written[name], each, rtol=1e-6, atol=1e-7, msg=name)
    for ep, zero in ((2, 0), (1, 3)):
        for found in pool.run(load, tmp_path, ep, zero, ranks=4):
            assert found.keys() == adapters.keys() | merged.keys()
            assert all(torch.equal(found[name], each) for name, each in adapters.items())
            for name, each in merged.items():
                torch.testing.assert_close(found[name], each, rtol=1e-6, atol=1e-7, msg=name)
