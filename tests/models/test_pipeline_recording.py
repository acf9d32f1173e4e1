"""A step on stages: communication recorded on shapes by each rank, and issued."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import ParallelPlan, PipelinePlan, parallelize, record
from weft.models.decoder import CausalModel
from weft.models.families import make_model
from weft.models.parallel.pipeline.cut import follow
from weft.models.step.alike import block_names, follow_few
from weft.models.step.communication import Communication
from weft.models.step.forward_backward import divide_batch, weight_criterion

from tests.models.stepping import observed_microbatches
from tests.models.test_pipeline import CONFIGS, MICROBATCHES, SCHEDULES, batch, make
from tests.models.test_pipeline_own_model import Pair, Residual, flat
from tests.support.sample import number_of

Both = tuple[Communication | None, Communication]


def both(
    model: nn.Module,
    axes: dict[str, int],
    plan: ParallelPlan,
    criterion: Any,
    *,
    count: int = 1,
    recorder: int | None = None,
) -> Both:
    """The communication recorded before a step, and issued by it. recorder: the rank that records; None for all."""
    mesh, (tokens, targets) = ProcessMesh.grid(**axes), batch()
    key = torch.tensor(77, dtype=torch.uint64)
    inputs = {"dropout_key": key} if isinstance(model, CausalModel) else {}
    options = {"microbatches": count, "clip_norm": 1e9, "inputs": inputs}
    recorded, rank = None, dist.get_rank()
    if recorder in (None, rank):  # recording takes longer than the step
        recorded = record(model, mesh, plan, batch=(tokens, targets), criterion=criterion, rank=rank, **options)
    parallelize(model, mesh, plan)
    parts = divide_batch(model, tokens, targets, plan.pipeline.microbatches if plan.pipeline else count, inputs)
    _, issued = observed_microbatches(model, weight_criterion(criterion, parts, targets), parts, clip_norm=1e9)
    return recorded, issued


def of_family(axes: dict[str, int], name: str, plan: dict[str, Any], pipeline: dict[str, Any], recorder: int) -> Both:
    """A family's model with the least layers and microbatches that the schedule needs."""
    model = make(name, axes["pp"] * (2 if pipeline.get("schedule") == "interleaved" else 1))
    cut = PipelinePlan(microbatches=axes["pp"], **pipeline)
    return both(model, axes, replace(model.parallel_plan(), **plan, pipeline=cut), cross_entropy, recorder=recorder)


MESHES = [
    pytest.param({"pp": 2}, {"recompute": "selective"}, id="pp2"),
    pytest.param({"pp": 2, "tp": 2}, {"sequence": True}, id="pp2-tp2-sequence", marks=pytest.mark.exhaustive),
    pytest.param({"pp": 2, "dp": 2}, {"zero": 2}, id="pp2-dp2-zero2", marks=pytest.mark.exhaustive),
    pytest.param(
        {"pp": 2, "cp": 2},
        {"context": "all_gather", "recompute": "full"},
        id="pp2-cp2-recompute",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param({"pp": 2, "dp": 2}, {"zero": 3}, id="pp2-dp2-zero3"),
    pytest.param({"pp": 4}, {"recompute": "selective"}, id="pp4", marks=pytest.mark.exhaustive),
]


@pytest.mark.exhaustive
@pytest.mark.table
@pytest.mark.parametrize("name", ["tied", "dropout", "gpt"])
@pytest.mark.parametrize("pipeline", SCHEDULES)
@pytest.mark.parametrize(("axes", "plan"), MESHES)
def test_a_pipeline_issues_the_recorded_collectives(
    axes: dict[str, int],
    plan: dict[str, Any],
    pipeline: dict[str, Any],
    name: str,
    pool: Any,
    combinations: Callable[[int], None],
) -> None:
    combinations(1)
    ranks = ProcessMesh.grid(**axes).size
    recorder = number_of((axes, plan, pipeline, name)) % ranks
    recorded, issued = pool.run(of_family, axes, name, plan, pipeline, recorder, ranks=ranks)[recorder]
    assert recorded == issued, f"\n{recorded}\n{issued}"
    assert recorded.select(kind="send").count
    assert recorded.select(kind="recv", axis="pp").nbytes


def own_model(frozen: bool) -> Both:
    torch.manual_seed(5)
    model = Residual()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or name.startswith(("blocks.3", "head")))
    plan = ParallelPlan(pipeline=PipelinePlan(microbatches=MICROBATCHES))
    return both(model, {"pp": 2}, plan, partial(flat, nn.functional.cross_entropy))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_of_ones_own_that_hands_pairs_on(frozen: bool, pool: Any) -> None:
    """Where the first stage learns nothing, nothing is sent back to it."""
    for rank, (recorded, issued) in enumerate(pool.run(own_model, frozen, ranks=2)):
        assert recorded == issued, f"\n{recorded}\n{issued}"
        back = recorded.select(phase="backward", kind=("recv", "send")[rank]).count
        assert back == (0 if frozen else 2 * MICROBATCHES)


def without_stages(zero: int) -> Both:
    model = make("llama", layers=2)
    plan = replace(model.parallel_plan(), zero=zero)
    return both(model, {"dp": 2}, plan, cross_entropy, count=2, recorder=zero % 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_microbatches_without_stages(zero: int, pool: Any) -> None:
    recorded, issued = pool.run(without_stages, zero, ranks=2)[zero % 2]
    assert recorded == issued, f"\n{recorded}\n{issued}"


def on_meta(layers: int = 3, **changes: Any) -> Any:
    with torch.device("meta"):
        return make_model(replace(CONFIGS["tied"], num_layers=layers, **changes))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axes", "plan"),
    [
        pytest.param({"pp": 2, "dp": 2}, {"zero": 3}, id="tied-stages-zero3"),
        pytest.param({"dp": 2, "tp": 4}, {"zero": 3}, id="meshes-zero3"),
        *(
            pytest.param({"pp": 3, "dp": 2}, {"zero": zero}, id=f"stages-zero{zero}", marks=pytest.mark.exhaustive)
            for zero in range(3)
        ),
        pytest.param(
            {"pp": 2, "dp": 2, "cp": 2, "tp": 2},
            {"zero": 3, "context": "all_gather"},
            id="every-axis",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param({"dp": 2, "tp": 4}, {}, id="meshes", marks=pytest.mark.exhaustive),
    ],
)
def test_a_norm_is_one_all_reduce(axes: dict[str, int], plan: dict[str, Any]) -> None:
    """It spans all axes and stages, also where key heads have a mesh of their own: four ranks share two heads."""
    mesh, stages = ProcessMesh.grid(**axes), axes.get("pp", 1)
    model = on_meta(stages, num_kv_heads=2)
    cut = PipelinePlan(microbatches=2) if "pp" in axes else None
    chosen = replace(model.parallel_plan(), **plan, pipeline=cut)
    for rank in (0, mesh.size - 1):
        step = partial(record, model, mesh, chosen, batch=(8, 8), rank=rank)
        asked, unasked = step(clip_norm=1.0), step()
        added = asked.counts - unasked.counts
        assert added == Counter({"all-reduce": 1}) and unasked.counts <= asked.counts
        assert asked.select(phase="gradients").counts - unasked.select(phase="gradients").counts == added


def recorded(rank: int, **axes: int) -> Communication:
    model = on_meta(axes["pp"])
    plan = replace(model.parallel_plan(), pipeline=PipelinePlan(microbatches=2))
    return record(model, ProcessMesh.grid(**axes), plan, batch=(2048 * 2, 9), rank=rank, clip_norm=1.0)


@pytest.mark.exhaustive
def test_the_bytes_from_stage_to_stage_are_those_of_the_activations() -> None:
    activations = 2048 * 2 * 9 * 32 * 4  # rows, tokens, hidden size, bytes
    first, second, last = (recorded(rank, pp=3) for rank in range(3))
    assert first.select(kind="recv").nbytes == last.select(kind="recv").nbytes == activations
    assert second.select(kind="recv").nbytes == 2 * activations
    assert second.select(kind="send", phase="forward").count == 2


@pytest.mark.exhaustive  # the sample has test_communication.py's, without stages
def test_a_rank_of_16384_is_recorded_with_the_calls_of_a_rank_of_64() -> None:
    def step(dp: int) -> None:
        recorded(13, pp=2, dp=dp, tp=4)

    def calls(dp: int) -> int:
        counted = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal counted
            counted += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            step(dp)
        finally:
            sys.setprofile(before)
        return counted

    step(4)  # fills caches and imports
    few = calls(8)
    assert calls(2048) < 1.02 * few


@pytest.mark.parametrize("name", CONFIGS)
def test_few_layers_tell_the_flow_of_all(name: str) -> None:
    with torch.device("meta"):
        model = make_model(replace(CONFIGS[name], num_layers=9))
    layers = block_names(model, model.parallel_plan())
    ran: list[nn.Module] = []
    kind = type(model.get_submodule(layers[0]))
    forward = kind.forward

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ran.append(self)
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", counted)
        few = follow_few(model, layers)
    assert len(ran) < 9
    assert few == follow(model, layers)
    assert few.outer_modules and few.layers == tuple(layers)


def test_a_flow_from_few_layers_has_the_readers_of_all() -> None:
    """All layers read the output of `side`; the end of the model reads the last layer's output, with `head`."""
    model = Residual()
    model.blocks.extend(Pair() for _ in range(5))
    layers = [f"blocks.{number}" for number in range(9)]
    few = follow_few(model, layers)
    assert few == follow(model, layers)
    assert few.outer_modules["side"] == {*range(9)}


@pytest.mark.parametrize("is_own", [True, False], ids=["weft", "foreign"])
def test_all_layers_of_a_foreign_model_run_for_the_cut(is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr("weft.models.step.record.follow_few", lambda *each: called.append("few") or follow_few(*each))
    model = make("llama", 4) if is_own else Residual()
    own = model.parallel_plan() if isinstance(model, CausalModel) else ParallelPlan()
    plan = replace(own, pipeline=PipelinePlan(microbatches=2))
    criterion = None if is_own else partial(flat, nn.functional.cross_entropy)
    record(model, ProcessMesh.grid(pp=2), plan, batch=batch(), criterion=criterion)
    assert called == (["few"] if is_own else [])


def test_a_rank_outside_has_no_stage() -> None:
    assert recorded(4, pp=2, dp=2) == Communication()


def test_batches_that_cannot_be_recorded_are_refused() -> None:
    model = on_meta()
    with pytest.raises(ValueError, match="3 microbatches do not divide the batch of 8 rows"):
        record(model, ProcessMesh.grid(dp=2), batch=(8, 9), microbatches=3)
    with pytest.raises(ValueError, match=r"cannot be divided into 2 microbatches; give both as \[B, T\]"):
        record(model, ProcessMesh.grid(dp=2), batch=(torch.ones(8, 9), torch.ones(8)), microbatches=2)
