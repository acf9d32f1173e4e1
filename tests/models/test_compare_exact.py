"""Two runs under one `exact` must have the same bits: any difference is a bug, however small, and is located."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from weft.models.compare.judge import shared_exact
from weft.models.compare.record_file import RunDigests
from weft.models.compare.report import compare_digests, describe, describe_facts, differing_facts, verdict_of
from weft.models.losses import local_value
from weft.models.train.digests import header_of
from weft.models.train.trainer import Trainer

from tests.models.planted import change_output, module, parameter
from tests.models.test_planted_faults import FAMILIES, Run
from tests.models.test_train_pipeline import made_run
from tests.support.pool import Pool

NAMED = "dp=2,tp=2"
STEPS = 2


def plant(trainer: Trainer, fault: str) -> None:
    """A fault of a unit in the last place, on every rank."""
    if fault == "forward":
        change_output(module(trainer, "layers.1.input_layernorm"), lambda out: out * (1 + 2**-23))
    if fault == "start":
        with torch.no_grad():
            local_value(parameter(trainer, "layers.1.mlp.down_proj.weight")).mul_(1 + 2**-23)
    if fault == "update":
        for group in trainer.optimizer.param_groups:
            group["eps"] *= 1 + 1e-3


def digested(
    text: str, mesh: dict[str, int], plan: dict[str, Any], options: dict[str, Any], fault: str, every: int
) -> Run:
    run = made_run(text, mesh, plan, digests=every, **options)
    trainer = Trainer(run, torch.device("cpu"))
    plant(trainer, fault)
    for step in range(STEPS):
        trainer.step(step)
    assert trainer.recorder is not None
    return header_of(run, trainer.model), trainer.recorder.take()


def found_by(pool: Pool, *arguments: Any) -> RunDigests:
    header, steps = pool.run(digested, *arguments, ranks=math.prod(arguments[1].values()))[0]
    return RunDigests(None, {0: header}, {each.step: each for each in steps})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("exact") / "text.txt"
    path.write_text("a stage gives what the next one takes " * 30)
    return str(path)


ONE = {"dp": 1, "tp": 1}
PLACES = {"forward": "layers.1.input_layernorm", "start": "layers.1.mlp.down_proj.weight", "update": ""}


@pytest.mark.exhaustive
@pytest.mark.parametrize("phase", PLACES)
def test_a_unit_in_the_last_place_is_rounding_without_exact_and_a_bug_with_it(
    phase: str, text: str, pool: Pool
) -> None:
    for exact in (None, NAMED):
        options = {"model": FAMILIES["llama"]}
        truth = found_by(pool, text, ONE, {"exact": exact}, options, "", 1)
        judge = compare_digests((truth, found_by(pool, text, {"dp": 2, "tp": 1}, {"exact": exact}, options, phase, 1)))
        said = describe(judge, ("a", "b"))
        if exact is None:
            assert verdict_of(judge) == "rounding", said
        else:
            found = judge.finding
            assert found is not None and found.allowed == 0 < found.difference, said
            assert (found.step, found.phase) == (1, phase) and found.name.startswith(PLACES[phase]), said
            assert "rounding explains nothing, since both runs take the sums of dp=2,tp=2" in said


MESHES: dict[str, Any] = {
    "dp2": ({"dp": 2, "tp": 1}, {}),
    "tp2": ({"dp": 1, "tp": 2}, {"recompute": "selective"}),
    "dp2-tp2": ({"dp": 2, "tp": 2}, {"zero": 3}),
    "pp2": ({"pp": 2, "dp": 1, "tp": 1}, {"zero": 1}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_digests_under_exact_have_the_same_bits_on_every_mesh(
    family: str, dtype: str, mesh: str, text: str, pool: Pool
) -> None:
    options, (sizes, plan) = {"model": FAMILIES[family], "dtype": dtype}, MESHES[mesh]
    plan = {"exact": NAMED, "microbatches": 2, **plan}
    alone = plan | {"recompute": "none", "zero": plan.get("zero", 0) & 2}
    judge = compare_digests(
        [found_by(pool, text, each, its_plan, options, "", 1) for each, its_plan in ((ONE, alone), (sizes, plan))]
    )
    assert verdict_of(judge) == "the same bits", describe(judge, ("one", mesh))
    assert judge.exact == NAMED and judge.tensors > 60


@pytest.mark.exhaustive
def test_the_promise_of_bits_needs_the_same_facts(text: str, pool: Pool) -> None:
    options = {"model": FAMILIES["llama"]}
    run = found_by(pool, text, ONE, {"exact": NAMED}, options, "", 2)
    header = run.header
    assert header.arithmetic is not None
    other = replace(header, arithmetic={**header.arithmetic, "threads": "2"})
    assert shared_exact([header, header]) == NAMED
    assert shared_exact([header, other]) == shared_exact([header, replace(header, arithmetic=None)]) == ""
    assert shared_exact([replace(header, arithmetic=None)] * 2) == ""
    runs = [run, replace(run, headers={0: other})]
    assert describe_facts(differing_facts(runs), ("a", "b")).endswith("same bits: threads is 1 in a and 2 in b")
    assert describe_facts(differing_facts([run, run]), ("a", "b")) == ""


@pytest.mark.exhaustive
def test_weights_of_unknown_steps_may_differ_by_rounding(text: str, pool: Pool) -> None:
    """Runs that share no first step: their histories may have been without `exact`."""
    options, faulty = {"model": FAMILIES["llama"]}, "forward"
    runs = [found_by(pool, text, ONE, {"exact": NAMED}, options, fault, 2) for fault in ("", faulty)]
    assert verdict_of(compare_digests(runs)) == "not rounding"
    later = [replace(each, steps={2: each.steps[2]}) for each in runs]
    judge = compare_digests(later)
    assert verdict_of(judge) == "rounding", describe(judge, ("a", "b"))
