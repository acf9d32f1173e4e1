"""`./run test_faults`: enough kills to hit every moment of a run, also while it saves, reads and exports.

WEFT_KILLS is the number of kills, WEFT_SEED the seed of their moments. That many kills hit commands as a user types
them, and as many hit workers with torch loaded, where the moments are closer together.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.attempts import WAYS, Tally, Victim, Way, complete
from tests.faults.commands import complete_by_command, survive_by_command, survive_by_torchrun
from tests.faults.elastic import survive_under_torchrun
from tests.faults.test_kills import survive
from tests.support.pool import Pool

KILLS = int(os.environ.get("WEFT_KILLS", "100"))
SEED = int(os.environ.get("WEFT_SEED", "0"))
KILLS_A_RUN = 10  # at most; after these the run completes, and is compared
AT_THE_END = 0.2  # the share of kills aimed at the time after the last checkpoint
EXPORT_SECONDS = 0.05  # seconds of work that an export takes
STEPS = 40  # of a command's run; only the first steps of a command take a random time
RESTARTS: dict[str, Callable[[Pool, Way, Path, Iterable[Victim], Path], Tally]] = {
    "by-the-same-call": survive,
    "by-torchrun": survive_under_torchrun,
}
COMMANDS = {"by-the-same-command": survive_by_command, "by-torchrun-of-the-command": survive_by_torchrun}


def victims(way: Way, work: float, seed: int) -> Iterator[Victim]:
    """A victim for each attempt: killed in its first half, so that a run has many kills, or at its end."""
    draw = random.Random(seed)
    while True:
        if draw.random() < AT_THE_END:
            yield Victim(draw.randrange(way.ranks), draw.uniform(0, EXPORT_SECONDS), after=way.steps)
        yield Victim(draw.randrange(way.ranks), draw.uniform(0, 0.5) * work, pause=draw.uniform(0, 0.02))


def victims_along(way: Way, kills: int, seed: int) -> list[Victim]:
    """A victim in each part of the run's steps, soon after a checkpoint, even during the next; the last at the end."""
    draw, part = random.Random(seed), way.steps // kills
    chosen = [
        Victim(draw.randrange(way.ranks), draw.uniform(0, 0.2), after=part * number + draw.randrange(part))
        for number in range(kills - 1)
    ]
    return [*chosen, Victim(draw.randrange(way.ranks), draw.uniform(0, EXPORT_SECONDS), after=way.steps)]


@pytest.mark.faults
@pytest.mark.parametrize("restarts", RESTARTS)
@pytest.mark.parametrize("name", WAYS)
def test_runs_survive_many_kills(name: str, restarts: str, tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "text.txt").write_text("what was saved is whole. " * 40)
    way, truth = replace(WAYS[name], steps=20), tmp_path / "truth"
    work = min(complete(pool, way, truth))
    drawn, wanted, found, runs = victims(way, work, SEED), -(-KILLS // len(WAYS) // len(RESTARTS)), Tally(), 0
    while found.kills < wanted:
        next_ones = [next(drawn) for _ in range(min(wanted - found.kills, KILLS_A_RUN))]
        found += RESTARTS[restarts](pool, way, tmp_path / f"run-{runs}", next_ones, truth)
        runs += 1
        print(f"\n{name}, {restarts}: {found}, {runs} runs compared with one never killed")
    assert found.survived == found.kills


@pytest.mark.faults
@pytest.mark.parametrize("restarts", COMMANDS)
@pytest.mark.parametrize("name", WAYS)
def test_the_command_survives_kills(name: str, restarts: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("what was saved is whole. " * 40)
    way, truth, found = replace(WAYS[name], steps=STEPS), tmp_path / "truth", Tally()
    complete_by_command(way, truth)
    wanted, runs = -(-KILLS // len(WAYS) // len(COMMANDS)), 0
    while found.kills < wanted:
        chosen = victims_along(way, min(wanted - found.kills, KILLS_A_RUN), SEED + runs)
        found += COMMANDS[restarts](way, tmp_path / f"run-{runs}", chosen, truth)
        runs += 1
        print(f"\n{name}, {restarts}: {found}, {runs} runs compared with one never killed")
    assert found.survived == found.kills
