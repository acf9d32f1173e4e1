"""Few microbatches of a pipeline run on shapes, with the record of all; hangs in a place of their own are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from weft.mesh import ProcessMesh
from weft.models import PipelinePlan
from weft.models.families import make_model
from weft.models.parallel.pipeline.step import RepeatedActions, RepeatsDiffer, RunningStep, can_repeat
from weft.models.predict.hang_report import Hang
from weft.models.predict.hangs import CallRecorder, NoHang
from weft.models.predict.rank_kinds import check_plan
from weft.models.schedules.schedule import Action
from weft.models.step import alike
from weft.models.step.record import RecordedStep, SharedRuns, StepShape, run_on_shapes
from weft.reshard.extension import recording, world

from tests.models.predict.hanging import tensor
from tests.models.test_every_mesh import FAMILIES, KEY, criterion_of, inputs_of

MICROBATCHES = 8
EVEN: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "num_heads": 8, "num_kv_heads": 8, "head_dim": 8, "intermediate_size": 128
}  # fmt: skip
MESHES = {"pp=2": {"pp": 2}, "pp=2 x dp=2 x tp=2": {"pp": 2, "dp": 2, "tp": 2}, "pp=4 x dp=2": {"pp": 4, "dp": 2}}


def make(family: str = "llama", layers: int = 8) -> Any:
    with torch.device("meta"):
        return make_model(replace(FAMILIES[family], **{"num_layers": layers, **EVEN}))


def shape_of(model: Any, axes: dict[str, int], microbatches: int = MICROBATCHES) -> StepShape:
    return StepShape(
        batch=(2 * microbatches * axes.get("dp", 1), 16),
        criterion=criterion_of(model, microbatches),
        inputs=inputs_of(model, KEY),
        microbatches=microbatches,
    )


def plan_of(model: Any, schedule: Any = "1f1b", **options: Any) -> Any:
    pipeline = PipelinePlan(schedule=schedule, microbatches=MICROBATCHES)
    return replace(model.parallel_plan(), pipeline=pipeline, **options)


def recorded(model: Any, axes: dict[str, int], plan: Any, rank: int, *, repeats: bool, shared: Any = None) -> Any:
    mesh = ProcessMesh.grid(**axes)
    recorder = CallRecorder(mesh.size, recorded.__code__)
    shape = replace(shape_of(model, axes), rank=rank)
    step = run_on_shapes(
        model, mesh, plan, shape, clip_norm=1.0, listen=recorder.listen, repeats=repeats, shared=shared
    )
    return step.communication, tuple(recorder.events), step.layouts


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"zero": 1}, {"zero": 2}, {"recompute": "full"}], ids=str)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_record_of_few_microbatches_is_that_of_all(mesh: str, schedule: str, options: dict[str, Any]) -> None:
    axes, model = MESHES[mesh], make()
    options = {**options, "sequence": "tp" in axes, "zero": options.get("zero", 0) if "dp" in axes else 0}
    plan, shared = plan_of(model, schedule, **options), SharedRuns()
    for rank in (0, ProcessMesh.grid(**axes).size - 1):
        few = recorded(model, axes, plan, rank, repeats=True, shared=shared)
        assert few == recorded(model, axes, plan, rank, repeats=False)
        assert len(few[1]) > 4 * MICROBATCHES


@pytest.mark.exhaustive
def test_three_microbatches_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Action] = []
    run = RepeatedActions.run

    def counted(self: RepeatedActions, action: Action, kind: Any, count: int, work: Any) -> Any:
        return run(self, action, kind, count, lambda: (ran.append(action), work())[1])

    monkeypatch.setattr(RepeatedActions, "run", counted)
    model = make()
    recorded(model, {"pp": 2}, plan_of(model), 0, repeats=True)
    assert [each.microbatch for each in ran if each.kind == "F"] == [0, 1, MICROBATCHES - 1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "gpt", "qwen3_moe"])
def test_forms_of_messages_from_few_blocks_are_those_of_all(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = make_model(replace(FAMILIES[family], num_layers=8))
    found, make_forms = [], alike.message_forms

    def both(*arguments: Any, few_blocks: bool) -> Any:
        found.append([make_forms(*arguments, few_blocks=few) for few in (True, False)])
        return found[-1][1]

    monkeypatch.setattr("weft.models.step.record.message_forms", both)
    run_on_shapes(model, ProcessMesh.grid(pp=2, tp=2), plan_of(model, sequence=True), shape_of(model, {}))
    assert found and all(few == whole and len(whole) == 2 for few, whole in found)


# ----- what is not repeated


def test_models_with_code_of_their_own_run_in_full() -> None:
    model = make()
    assert can_repeat(model, None)
    model.layers[3].register_forward_hook(lambda *_: None)
    assert not can_repeat(model, None)
    assert not can_repeat(make(), lambda output, targets: output.sum())
    changed = make()
    changed.layers[3].forward = lambda *_: None
    assert not can_repeat(changed, None)


@pytest.mark.parametrize("odd", [2, 7])
def test_collectives_that_differ_are_noticed(odd: int) -> None:
    """In the last microbatch by comparison; in the second, which stands for others, by the last."""
    mesh = ProcessMesh.grid(tp=2)
    with recording(mesh, 0) as record, torch.device("meta"):
        repeated = RepeatedActions(record)

        def work(microbatch: int) -> None:
            for _ in range(2 if microbatch == odd else 1):
                dist.all_reduce(tensor(), group=world().group_of_ranks((0, 1)))

        def run() -> None:
            for microbatch in range(8):
                action = Action("F", 0, microbatch)
                repeated.run(action, None, 8, lambda microbatch=microbatch: work(microbatch))  # type: ignore[misc]

        if odd == 7:
            with pytest.raises(RepeatsDiffer):
                run()
        else:
            run()
            assert len(record.take_each()) == 8


# ----- hangs in one place


def check(model: Any, axes: dict[str, int], plan: Any, *, most_ranks: int = 1, update: Any = None) -> NoHang | Hang:
    count = MICROBATCHES if "pp" in axes else 1
    mesh, shape, shared = ProcessMesh.grid(**axes), shape_of(model, axes, count), SharedRuns()

    def record_rank(rank: int, listen: Any) -> RecordedStep:
        own = None if update is None else lambda _: update(rank)
        return run_on_shapes(
            model, mesh, plan, replace(shape, rank=rank), clip_norm=1.0, update=own, listen=listen, shared=shared
        )

    assert not isinstance(shape.batch[0], torch.Tensor)
    return check_plan(record_rank, mesh, plan, batch=(shape.batch[0] // count, 16), most_ranks=most_ranks)


def extra_sum() -> None:
    """A sum over all four ranks that rank 3 leaves out."""
    if world().rank != 3:
        dist.all_reduce(tensor(3), group=world().group_of_ranks(tuple(range(4))))


def assert_found(found: NoHang | Hang) -> None:
    assert isinstance(found, Hang) and "all-reduce of [3] float32" in str(found), found


@pytest.mark.exhaustive
@pytest.mark.parametrize("microbatch", [3, MICROBATCHES - 1])
def test_a_hang_in_one_microbatch_alone(microbatch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = RunningStep._forward

    def faulty(self: RunningStep, action: Action) -> None:
        forward(self, action)
        if action.microbatch == microbatch:
            extra_sum()

    axes, model = {"pp": 2, "tp": 2}, make()
    assert isinstance(check(model, axes, plan_of(model)), NoHang)
    monkeypatch.setattr(RunningStep, "_forward", faulty)
    assert_found(check(model, axes, plan_of(model)))


@pytest.mark.exhaustive
def test_a_hang_in_the_last_call_of_a_block_alone() -> None:
    axes, model, calls = {"pp": 2, "tp": 2}, make(), []

    def counting(*_: Any) -> None:
        calls.append(None)
        if len(calls) % MICROBATCHES == 0:
            extra_sum()

    model.layers[5].register_forward_hook(counting)
    found = check(model, axes, plan_of(model), most_ranks=64)
    assert isinstance(found, Hang), found


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", [2, 5])
def test_a_hang_in_a_middle_block_alone(block: int) -> None:
    axes, model = {"pp": 2, "tp": 2}, make()
    model.layers[block].mlp.register_forward_hook(lambda *_: extra_sum())
    assert_found(check(model, axes, plan_of(model), most_ranks=64))


@pytest.mark.exhaustive
@pytest.mark.parametrize("culprit", [0, 16383])
def test_a_hang_on_one_rank_of_16384(culprit: int) -> None:
    axes, model = {"dp": 2048, "tp": 8}, make(layers=2)

    def fault(rank: int) -> None:
        if rank == culprit:
            dist.all_reduce(tensor(3), group=world().group_of_ranks((0, 16383)))

    plan = replace(model.parallel_plan(), zero=0)
    if culprit:
        clean = check(model, axes, plan)
        assert isinstance(clean, NoHang) and clean.ranks == 16384 and clean.recorded <= 2, clean
    found = check(model, axes, plan, update=fault)
    assert isinstance(found, Hang) and found.kind == "missing", found
    assert f"rank {culprit} waits" in found.reason and "in fault" in str(found), found
