"""`./run test_faults`: so many kills that every moment of a run, saving and reading included, has had some.

WEFT_KILLS says how many, WEFT_SEED where the draw of their moments begins.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.attempts import WAYS, Victim, Way, assert_same, complete
from tests.faults.elastic import survive_under_torchrun
from tests.faults.test_kills import survive
from tests.support.pool import Pool

KILLS = int(os.environ.get("WEFT_KILLS", "100"))
SEED = int(os.environ.get("WEFT_SEED", "0"))
KILLS_A_RUN = 10  # at most: then it is let go to its end, and compared
RESTARTS: dict[str, Callable[[Pool, Way, Path, list[Victim]], int]] = {
    "by-the-same-call": survive,
    "by-torchrun": survive_under_torchrun,
}


def victims(way: Way, work: float, seed: int) -> Iterator[Victim]:
    """Of each attempt the rank that is killed, and when: mostly in its first half, so that there are many in a run."""
    draw = random.Random(seed)
    while True:
        yield Victim(draw.randrange(way.ranks), draw.uniform(0, 0.5) * work, pause=draw.uniform(0, 0.02))


@pytest.mark.faults
@pytest.mark.parametrize("restarts", RESTARTS)
@pytest.mark.parametrize("name", WAYS)
def test_runs_survive_many_kills(name: str, restarts: str, tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "text.txt").write_text("what was saved is whole. " * 40)
    way = replace(WAYS[name], steps=20)
    work = min(complete(pool, way, tmp_path / "truth"))
    drawn, wanted, survived, runs = victims(way, work, SEED), -(-KILLS // len(WAYS) // len(RESTARTS)), 0, 0
    while survived < wanted:
        next_ones = [next(drawn) for _ in range(min(wanted - survived, KILLS_A_RUN))]
        survived += RESTARTS[restarts](pool, way, tmp_path / f"run-{runs}", next_ones)
        assert_same(tmp_path / f"run-{runs}", tmp_path / "truth")
        runs += 1
        print(
            f"\n{name}, {restarts}: {survived} of {survived} kills survived, {runs} runs of the bits of one never killed"
        )
