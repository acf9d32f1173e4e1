"""Ranks killed at any moment, even while saving a checkpoint: the resumed run ends like an undisturbed run."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from weft.models.train.folder import checkpoints, newest_complete

from tests.faults.attempts import (
    WAYS,
    Tally,
    Victim,
    Way,
    assert_same,
    complete,
    is_killed,
    lines,
    weights,
)
from tests.support.pool import Pool, RanksFailed

Truths = Callable[[str], tuple[Path, float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs and of their text."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("what was saved is whole. " * 40)
    return folder


@pytest.fixture(scope="module")
def truths(folder: Path, pool: Pool) -> Truths:
    """By way's name: the folder of an undisturbed run, made on first request, and the least work of its ranks."""
    taken: dict[str, tuple[Path, float]] = {}

    def truth_of(name: str) -> tuple[Path, float]:
        if name not in taken:
            taken[name] = folder / name, min(complete(pool, WAYS[name], folder / name))
        return taken[name]

    return truth_of


def survive(pool: Pool, way: Way, folder: Path, victims: Iterable[Victim], truth: Path) -> Tally:
    """Start the run again with the same call after each victim, until it is complete, and compare it with `truth`.

    Raises an error where no rank was killed; else prints the error, and counts the kills as lost.
    """
    kills = lost = at_the_end = 0
    try:
        for victim in victims:
            before = list(checkpoints(folder))
            if not is_killed(pool, way, folder, victim):
                break
            kills += 1
            lost += list(checkpoints(folder))[-1:] < before[-1:]
            at_the_end += way.steps in checkpoints(folder)
        else:
            complete(pool, way, folder)
        assert_same(folder, truth)
    except (RanksFailed, AssertionError) as error:
        if not kills:
            raise
        print(error)
        return Tally(kills, 0)
    return Tally(kills, kills - lost, at_the_end)


def test_a_run_goes_on_after_a_kill_with_the_bits_of_one_never_killed(folder: Path, truths: Truths, pool: Pool) -> None:
    """A rank is killed in the steps after the first checkpoints."""
    truth, _ = truths("pp2")
    found = survive(pool, WAYS["pp2"], folder / "killed-once", [Victim(1, after=4)], truth)
    assert (found.kills, found.survived) == (1, 1)


@pytest.mark.exhaustive  # the sample has the kill above; kills here come at any moment
@pytest.mark.parametrize("name", list(WAYS))
def test_a_run_whose_ranks_are_killed_ends_as_one_that_was_not(
    name: str, folder: Path, truths: Truths, pool: Pool
) -> None:
    (truth, work), way, draw = truths(name), WAYS[name], random.Random(name)
    victim = Victim(draw.randrange(way.ranks), draw.uniform(0.1, 0.8) * work)
    found = survive(pool, way, folder / f"{name}-killed", [victim], truth)
    assert (found.kills, found.survived) == (1, 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("wrong", ["weights", "steps"])
def test_a_kill_that_a_run_does_not_survive_is_counted(
    wrong: str, folder: Path, truths: Truths, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two invented runs: one ends with different weights, one has lost a checkpoint."""
    truth, run = truths("pp2")[0], folder / f"other-{wrong}"
    shutil.copytree(truth, run)

    def killed(*arguments: Any) -> bool:
        if wrong == "steps":
            shutil.rmtree(run / "checkpoint-8")
        else:
            path = run / "checkpoint/model.safetensors"
            save_file({name: each + 1 for name, each in weights(run).items()}, path)
        return True

    monkeypatch.setattr(f"{__name__}.is_killed", killed)
    monkeypatch.setattr(f"{__name__}.complete", lambda *arguments: [0.0])
    assert str(survive(pool, WAYS["pp2"], run, [Victim(0)], truth)).startswith("0 of 1 kills survived")


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_run_that_is_killed_after_its_last_step_exports_the_same(
    rank: int, folder: Path, truths: Truths, pool: Pool
) -> None:
    """The last checkpoint is complete, and the exported model is missing or has just been written."""
    (truth, _), way = truths("pp2"), WAYS["pp2"]
    found = survive(pool, way, folder / f"killed-at-the-end-{rank}", [Victim(rank, after=way.steps)], truth)
    assert (found.kills, found.survived, found.at_the_end) == (1, 1, 1)


MESHES = [
    ("pp2", "dp2"),
    pytest.param("tp2-zero3-dp2", "pp2", marks=pytest.mark.exhaustive),
    pytest.param("dp2", "tp2-zero3-dp2", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("before", "after"), MESHES)
def test_anchor_32_another_mesh_goes_on_with_the_same_samples(
    before: str, after: str, folder: Path, truths: Truths, pool: Pool
) -> None:
    """The numbers are the first mesh's up to the order of sums: losses within 2e-5, weights within 1e-5."""
    (truth, _), run = truths(before), folder / f"{before}-to-{after}"
    shutil.copytree(truth, run, ignore=shutil.ignore_patterns("checkpoint", "checkpoint-[68]"))
    complete(pool, WAYS[after], run)
    wanted = lines(truth)
    assert newest_complete(run)[0] == run / "checkpoint-8"
    assert [step for step, _, _ in lines(run)] == [step for step, _, _ in wanted] == list(range(1, 9))
    for (_, *found), (_, *true) in zip(lines(run), wanted, strict=True):
        assert found == pytest.approx(true, rel=2e-5)
    found_weights, true_weights = weights(run), weights(truth)
    for name, weight in true_weights.items():
        torch.testing.assert_close(found_weights[name], weight, rtol=1e-4, atol=1e-5)
