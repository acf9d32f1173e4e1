"""Ranks that are killed at any moment, also while a checkpoint is written: the run that goes on ends as if nothing had been."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from weft.models.train.folder import checkpoints, newest_complete

from tests.faults.attempts import WAYS, Victim, Way, assert_same, attempt, complete, lines, weights
from tests.support.pool import Pool, RanksFailed


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("what was saved is whole. " * 40)
    return tmp_path


def survive(pool: Pool, way: Way, folder: Path, victims: Iterable[Victim]) -> int:
    """Runs to the end, begun again by the same call for each victim until it is there; how many there were.

    What a complete checkpoint holds is not lost: what goes on is at its step.
    """
    survived = 0
    for victim in victims:
        before = list(checkpoints(folder))
        try:
            pool.run(attempt, way, folder, victim, ranks=way.ranks)
        except RanksFailed as error:
            assert "SIGKILL" in error.failures[0].what, error
            assert list(checkpoints(folder))[-1:] >= before[-1:]
            survived += 1
        else:
            return survived
    complete(pool, way, folder)
    return survived


@pytest.mark.exhaustive  # its sister, anchor 32, has a run that is killed too
@pytest.mark.parametrize("name", list(WAYS))
def test_a_run_whose_ranks_are_killed_ends_as_one_that_was_not(name: str, text: Path, pool: Pool) -> None:
    way, draw = WAYS[name], random.Random(name)
    work = min(complete(pool, way, text / "truth"))
    assert survive(pool, way, text / "run", [Victim(draw.randrange(way.ranks), draw.uniform(0.1, 0.8) * work)]) == 1
    assert_same(text / "run", text / "truth")


MESHES = [
    ("pp2", "dp2"),
    pytest.param("tp2-zero3-dp2", "pp2", marks=pytest.mark.exhaustive),
    pytest.param("dp2", "tp2-zero3-dp2", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("before", "after"), MESHES)
def test_anchor_32_another_mesh_goes_on_with_the_same_samples(before: str, after: str, text: Path, pool: Pool) -> None:
    """The numbers are those of the first mesh but for the order of sums: of the losses relative, of the weights beside 0.01 a step."""
    complete(pool, WAYS[before], text / "truth")
    shutil.copytree(text / "truth", text / "run", ignore=shutil.ignore_patterns("checkpoint", "checkpoint-[68]"))
    complete(pool, WAYS[after], text / "run")
    wanted = lines(text / "truth")
    assert newest_complete(text / "run")[0] == text / "run/checkpoint-8"
    assert [step for step, _, _ in lines(text / "run")] == [step for step, _, _ in wanted] == list(range(1, 9))
    for (_, *found), (_, *truth) in zip(lines(text / "run"), wanted, strict=True):
        assert found == pytest.approx(truth, rel=2e-5)
    found_weights, true_weights = weights(text / "run"), weights(text / "truth")
    for name, weight in true_weights.items():
        torch.testing.assert_close(found_weights[name], weight, rtol=1e-4, atol=1e-5)
