"""The names that a trace of torch's profiler has for the parts of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import Llama, PipelinePlan, forward_backward, initialize, parallelize
from weft.models.tracing import traced

from tests.models.cases import SMALL, some_tokens
from tests.models.test_train_steps import trainer
from tests.support.pool import Pool


def names_of_a_step(axes: dict[str, int] | None) -> Counter[str]:
    """How often each stands in the trace of a step of two microbatches."""
    model = Llama(SMALL)
    initialize(model, seed=0)
    if axes is not None:
        pipeline = PipelinePlan(schedule="zero_bubble", microbatches=2)
        parallelize(model, ProcessMesh.grid(**axes), replace(model.parallel_plan(), pipeline=pipeline))
    tokens = some_tokens(SMALL, 4, 9)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        forward_backward(model, cross_entropy, tokens[:, :-1], tokens[:, 1:], microbatches=2)
    return Counter(event.name for event in found.events() or () if event.name.startswith("weft."))


def test_the_parts_of_a_step_are_named() -> None:
    assert names_of_a_step(None) == {"weft.forward": 2, "weft.backward": 2, "weft.sync": 1}


@pytest.mark.exhaustive
def test_the_actions_of_a_stage_are_named(pool: Pool) -> None:
    found = pool.run(names_of_a_step, {"pp": 2}, ranks=2)
    # The first rank has two backwards a microbatch, of activations and of weights; the first stage is its only one.
    assert found == [{"weft.forward": 2, "weft.backward": 4, "weft.sync": 1}] * 2


def names_of_a_trained_step(text: str) -> Counter[str]:
    """The names in the second step of a run on one process, and in an evaluation."""
    made = trainer(text, (1, 1, 1))
    made.step(0)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        made.step(1)
        made.held_out_loss()
    return Counter(event.name for event in found.events() or () if event.name.startswith("weft."))


@pytest.mark.exhaustive
def test_the_wait_for_data_and_the_update_are_named_too(tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "text.txt").write_text("a step waits for no device " * 30)
    (found,) = pool.run(names_of_a_trained_step, str(tmp_path / "text.txt"), ranks=1)
    parts = ("data", "forward", "backward", "sync", "clip", "optimizer", "evaluate")
    assert found == {f"weft.{part}": 1 for part in parts}


def test_nothing_is_recorded_where_nothing_is_profiled() -> None:
    with traced("forward") as recorded:
        assert recorded is None
