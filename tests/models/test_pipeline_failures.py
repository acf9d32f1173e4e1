"""An error of a rank's work ends a pipeline's step on all ranks, and the next step has the loss of one process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh
from weft.models import PipelinePlan, forward_backward, lay_out_batch, parallelize
from weft.models.parallel.parallelize import pipeline_of
from weft.models.parallel.pipeline import failures
from weft.models.step.find_gradients import find_loss
from weft.models.step.forward_backward import divide_batch
from weft.reshard import distribute

from tests.models.cases import gradients_off, whole
from tests.models.test_pipeline import MICROBATCHES, batch, expected, layers_for, make
from tests.support.pool import Pool, RanksFailed

SECONDS = 120.0  # for all ranks to raise; a hang lasts for the 30 minutes of a group's timeout


class Planted(Exception):
    """An error of the program of a test."""


class Fault:
    """Raises Planted in a place of the model or the criterion, in some calls.

    place: "criterion", or "forward" or "backward" and the number of a layer. call: the first call which raises, from 0.
    alone: only on the ranks whose coordinate on this axis is 0.
    """

    def __init__(self, mesh: ProcessMesh, place: str, call: int = 0, alone: str = "") -> None:
        self.place, self.call, self.calls, self.armed = place, call, 0, False
        coordinate = mesh.coordinate(dist.get_rank())
        self.is_here = not alone or coordinate[alone] == 0

    def count(self) -> None:
        if self.armed and self.is_here:
            self.calls += 1
            if self.calls > self.call:
                raise Planted(f"in {self.place}")

    def plant(self, model: Any) -> None:
        if self.place == "criterion":
            return
        kind, layer = self.place.split()

        def hook(module: Any, args: Any, output: Tensor) -> None:
            if kind == "forward":
                self.count()
            elif output.requires_grad:
                output.register_hook(lambda grad: self.count())

        model.layers[int(layer)].register_forward_hook(hook)

    def criterion(self, output: Tensor, targets: Tensor, denominator: Any = None) -> Tensor:
        if self.place == "criterion":
            self.count()
        return cross_entropy(output, targets, denominator=denominator)


def raised(act: Callable[[], Any]) -> str:
    start = time.monotonic()
    try:
        act()
    except Exception as error:
        assert time.monotonic() - start < SECONDS
        return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}"
    return "nothing raised"


def made(axes: dict[str, int], plan: dict[str, Any], pipeline: dict[str, Any], fault: Fault | None = None) -> Any:
    model = make("llama", layers_for(axes, pipeline))
    if fault is not None:
        fault.plant(model)
    own = replace(model.parallel_plan(), **plan, pipeline=PipelinePlan(**{"microbatches": MICROBATCHES, **pipeline}))
    return parallelize(model, ProcessMesh.grid(**axes), own)


def failing(
    axes: dict[str, int], plan: dict[str, Any], pipeline: dict[str, Any], fault: dict[str, Any], first: bool
) -> tuple[list[str], list[str]]:
    """The errors of two failing steps; what is wrong with the steps before and after.

    first: whether the first step fails, before any message was sent.
    """
    planted = Fault(ProcessMesh.grid(**axes), **fault)
    model = made(axes, plan, pipeline, planted)
    truth, gradients = expected("llama", MICROBATCHES, layers_for(axes, pipeline))
    tokens, targets = batch()
    wrong: list[str] = []

    def step() -> None:
        model.zero_grad()
        loss = forward_backward(model, planted.criterion, tokens, targets).item()
        wrong.extend(gradients_off({name: whole(p.grad) for name, p in model.named_parameters()}, gradients))
        if abs(loss - truth) > 1e-5 * truth:
            wrong.append(f"the loss is {loss}, not {truth}")

    if not first:
        step()
    errors = []
    for _ in range(2):
        planted.armed, planted.calls = True, 0
        errors.append(raised(step))
        planted.armed = False
    step()
    # other rows: messages of a new form
    model.zero_grad()
    planted.armed, planted.calls = True, 0
    errors.append(raised(lambda: forward_backward(model, planted.criterion, tokens[:4], targets[:4])))
    planted.armed = False
    model.zero_grad()
    short = forward_backward(model, planted.criterion, tokens[:4], targets[:4])
    step()
    if not math.isfinite(short):
        wrong.append(f"the loss of few rows is {short}")
    return errors, wrong


MESHES = [
    pytest.param({"pp": 2}, {}, {}, id="pp2"),
    pytest.param({"pp": 3}, {"recompute": "full"}, {"schedule": "zero_bubble"}, id="pp3-zero-bubble"),
    pytest.param({"pp": 2}, {}, {"schedule": "interleaved"}, id="pp2-interleaved"),
    pytest.param({"pp": 2, "dp": 2}, {"zero": 1}, {"schedule": "gpipe"}, id="pp2-dp2-zero1"),
    pytest.param({"pp": 2, "dp": 2}, {"zero": 2}, {}, id="pp2-dp2-zero2"),
    pytest.param({"pp": 2, "dp": 2}, {"zero": 3}, {}, id="pp2-dp2-zero3"),
    pytest.param({"pp": 2, "tp": 2}, {"sequence": True}, {}, id="pp2-tp2"),
]
FAULTS = [
    pytest.param({"place": "criterion"}, id="criterion"),
    pytest.param({"place": "criterion", "call": 2}, id="criterion-later"),
    pytest.param({"place": "forward 0"}, id="first-layer"),
    pytest.param({"place": "forward 0", "call": 3}, id="first-layer-last-microbatch"),
    pytest.param({"place": "forward 2", "call": 1}, id="last-layer"),
    pytest.param({"place": "backward 0"}, id="backward-of-first-layer"),
    pytest.param({"place": "backward 2", "call": 1}, id="backward-of-last-layer"),
]


def assert_all_raised(found: list[tuple[list[str], list[str]]], place: str) -> None:
    for errors, wrong in found:
        assert len(errors) == 3 and not wrong, wrong
        for error in errors:
            assert f"in {place}" in error and "zero_grad()" in error, error
    for step in range(3):
        of_ranks = [errors[step] for errors, _ in found]
        assert any(each.startswith("Planted") for each in of_ranks)
        assert all("raised Planted in" in each for each in of_ranks if not each.startswith("Planted"))


@pytest.mark.parametrize("first", [True, False], ids=["first-step", "later-step"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("axes", "plan", "pipeline"), MESHES)
def test_an_error_ends_the_step_everywhere_and_the_next_step_is_right(
    axes: dict[str, int],
    plan: dict[str, Any],
    pipeline: dict[str, Any],
    fault: dict[str, Any],
    first: bool,
    pool: Pool,
) -> None:
    ranks = math.prod(axes.values())
    found = pool.run(failing, axes, plan, pipeline, fault, first, ranks=ranks, timeout=3 * SECONDS)
    assert_all_raised(found, fault["place"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "fault", [{"place": "criterion"}, {"place": "criterion", "call": 1}, {"place": "backward 0", "call": 1}], ids=str
)
def test_an_error_on_one_rank_of_a_stage(zero: int, fault: dict[str, Any], pool: Pool) -> None:
    """The ranks of a stage then share gradients only, which the failed rank replaces by zeros."""
    axes, alone = {"pp": 2, "dp": 2}, {**fault, "alone": "dp"}
    found = pool.run(failing, axes, {"zero": zero}, {}, alone, False, ranks=4, timeout=3 * SECONDS)
    assert_all_raised(found, fault["place"])


def failing_alone(folder: Path) -> None:
    """On tp, a rank of a stage fails, and the second rank of the stage waits for a collective."""
    failures.PATIENCE = 2.0
    axes = {"pp": 2, "tp": 2}
    fault = Fault(ProcessMesh.grid(**axes), "forward 1", 1, "tp")
    model = made(axes, {}, {}, fault)
    tokens, targets = batch()
    forward_backward(model, cross_entropy, tokens, targets)
    fault.armed = True
    errors = [raised(lambda: forward_backward(model, cross_entropy, tokens, targets)) for _ in range(2)]
    if "Planted" in errors[0]:
        (folder / f"{dist.get_rank()}").write_text("\n".join(errors))


@pytest.mark.exhaustive
def test_a_rank_that_others_wait_for_in_a_collective_raises_within_its_patience(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):  # the others wait until a process ends, as without stages
        pool.run(failing_alone, tmp_path, ranks=4, timeout=SECONDS)
    (file,) = tmp_path.iterdir()
    first, second = file.read_text().split("\n")
    assert first.startswith("Planted: in forward 1")
    assert "an earlier step of this pipeline lost messages" in second


def evaluated(place: str) -> list[str]:
    """The errors of an evaluation; and of what is wrong with the evaluation before and after."""
    axes = {"pp": 2, "dp": 2}
    fault = Fault(ProcessMesh.grid(**axes), place, alone="dp")
    model = made(axes, {}, {}, fault)
    tokens, targets = batch()
    truth = float(cross_entropy(make("llama", layers_for(axes, {}))(tokens), targets))
    denominator = (targets != -100).sum()

    def loss_of(counts: list[int]) -> float:
        parts = [
            divide_batch(model, *each, 1, {})[0]
            for each in zip(tokens.split(counts), targets.split(counts), strict=True)
        ]
        return float(find_loss(model, lambda o, t: fault.criterion(o, t, denominator), parts))

    found = []
    for counts in ([2, 2, 2, 2], [3, 3, 2], [8], [3, 3, 2]):  # 3 rows are 2 and 1 on the ranks of dp
        with torch.no_grad():
            loss = loss_of(counts)
        if abs(loss - truth) > 1e-5 * truth:
            found.append(f"the loss of microbatches of {counts} is {loss}, not {truth}")
        fault.armed = True
        error = raised(lambda counts=counts: loss_of(counts))
        fault.armed = False
        if f"in {place}" not in error:
            found.append(error)
    loss = forward_backward(model, fault.criterion, tokens, targets)
    if abs(loss - truth) > 1e-5 * truth:
        found.append(f"the loss of a step is {loss}, not {truth}")
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["criterion", "forward 0", "forward 2"])
def test_an_error_in_an_evaluation_with_a_ragged_last_microbatch(place: str, pool: Pool) -> None:
    assert pool.run(evaluated, place, ranks=4, timeout=3 * SECONDS) == [[]] * 4


def refused(axes: dict[str, int]) -> dict[str, str]:
    """Errors of the caller, each followed by a step."""
    model = made(axes, {"context": "all_gather"} if "cp" in axes else {}, {"microbatches": 2})
    mesh, (tokens, targets) = ProcessMesh.grid(**axes), batch()
    plan = replace(make("llama").parallel_plan(), context="all_gather" if "cp" in axes else None)
    found = {}

    def note(name: str, *args: Any, **options: Any) -> None:
        found[name] = raised(lambda: forward_backward(model, cross_entropy, *args, **options))
        if name != "floats":  # the next step works
            assert torch.isfinite(forward_backward(model, cross_entropy, tokens, targets))

    note("floats", tokens, targets.float())
    note("floats", tokens, targets.float())
    note("indivisible", tokens, targets, microbatches=3)
    note("other-shape", tokens, targets[:, 1:])
    note("an unknown argument", tokens, targets, colour=1)
    note("a label out of range", tokens, targets + 40)
    if "dp" in axes:
        rows = Layout(mesh, {"dp": "S(0)"})
        uneven = [distribute(each[:3].contiguous(), rows) for each in (tokens, targets)]
        note("uneven", *uneven, microbatches=2)
    if "cp" in axes:
        laid = lay_out_batch(pipeline_of(model).stage_mesh, plan, tokens, targets)
        note("copy", laid.tokens.clone(), laid.targets)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", [{"pp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "cp": 2}], ids=str)
def test_a_refusal_is_raised_on_all_ranks(axes: dict[str, int], pool: Pool) -> None:
    found = pool.run(refused, axes, ranks=math.prod(axes.values()), timeout=3 * SECONDS)
    for name in found[0]:
        of_ranks = [each[name] for each in found]
        assert "nothing raised" not in of_ranks, name
    for of_rank in found:
        assert of_rank["floats"].startswith(("TypeError", "ValueError")), of_rank["floats"]
        assert "3 microbatches do not divide the batch of 8 rows" in of_rank["indivisible"]
        assert "targets" in of_rank["other-shape"]
        assert "colour" in of_rank["an unknown argument"]
        if "dp" in axes:
            assert of_rank["uneven"].startswith("ValueError: 2 microbatches do not divide")
        if "cp" in axes:
            assert of_rank["copy"].startswith("ValueError") and "positions=batch.positions" in of_rank["copy"]
            assert "zero_grad" not in of_rank["copy"]  # refused before the schedule starts
