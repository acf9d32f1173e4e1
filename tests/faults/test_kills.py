"""Ranks that are killed at any moment, also while a checkpoint is written: the run that goes on ends as if nothing had been."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.faults.attempts import WAYS, Victim, Way, assert_same, attempt, complete
from tests.support.pool import Pool, RanksFailed


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("what was saved is whole. " * 40)
    return tmp_path


def survive(pool: Pool, way: Way, folder: Path, kills: int, seed: int) -> int:
    """Runs to the end, killed so often or until it is there; how often it was."""
    draw, survived = random.Random(seed), 0
    start = time.monotonic()
    complete(pool, way, folder.with_name("truth"))
    seconds = time.monotonic() - start
    while survived < kills:
        victim = Victim(draw.randrange(way.ranks), draw.uniform(0.1, 0.8) * seconds)
        try:
            pool.run(attempt, way, folder, victim, ranks=way.ranks)
        except RanksFailed as error:
            assert "SIGKILL" in error.failures[0].what, error
            survived += 1
        else:
            break
    complete(pool, way, folder)
    return survived


@pytest.mark.parametrize("name", WAYS)
def test_a_run_whose_ranks_are_killed_ends_as_one_that_was_not(name: str, text: Path, pool: Pool) -> None:
    survive(pool, WAYS[name], text / "run", kills=1, seed=len(name))
    assert_same(text / "run", text / "truth")
