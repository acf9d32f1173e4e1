"""`./run test_faults`: so many kills that every moment of a run, saving, reading and exporting included, has had some.

WEFT_KILLS says how many, WEFT_SEED where the draw of their moments begins. There are as many of the commands as a user types
them, and as many in workers that have torch loaded, whose moments lie closer together.
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
KILLS_A_RUN = 10  # at most: then it is let go to its end, and compared
AT_THE_END = 0.2  # of the kills those that are aimed at what comes after the last checkpoint
EXPORT_SECONDS = 0.05  # of work, that it takes
STEPS = 40  # of a run of the command: the first steps are all that is random of the time that a command takes
RESTARTS: dict[str, Callable[[Pool, Way, Path, Iterable[Victim], Path], Tally]] = {
    "by-the-same-call": survive,
    "by-torchrun": survive_under_torchrun,
}
COMMANDS = {"by-the-same-command": survive_by_command, "by-torchrun-of-the-command": survive_by_torchrun}


def victims(way: Way, work: float, seed: int) -> Iterator[Victim]:
    """Of each attempt the rank that is killed, and when: in its first half, so that there are many in a run, or at its end."""
    draw = random.Random(seed)
    while True:
        if draw.random() < AT_THE_END:
            yield Victim(draw.randrange(way.ranks), draw.uniform(0, EXPORT_SECONDS), after=way.steps)
        yield Victim(draw.randrange(way.ranks), draw.uniform(0, 0.5) * work, pause=draw.uniform(0, 0.02))


def victims_along(way: Way, kills: int, seed: int) -> list[Victim]:
    """One in each part of the run's steps, soon after a checkpoint, also while the next is written; the last at the run's end."""
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
