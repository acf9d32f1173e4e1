"""A run of a task that is killed and resumed has the bits of a run that was not, and on another mesh its losses."""

from __future__ import annotations

import math
import os
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from weft.models.data.examples.example import Task
from weft.models.train.loop import Trainer
from weft.models.train.run import Run

from tests.faults.attempts import Fuse, Victim
from tests.models.tuning.runs import LORA, make_run, read_metrics, records, save_model, train_to_the_end, write
from tests.support.pool import Pool, RanksFailed

STEPS, SAVED, KILLED = 6, 2, 4
OPTIONS = ("--save-every", str(SAVED), "--optimizer.warmup-steps", "2", "--optimizer.lr", "1e-3", "--log-every", "1")
CASES: dict[str, tuple[Task, tuple[str, ...]]] = {
    "sft": ("sft", ()),
    "dpo-adapters-dropout": ("dpo", (*LORA, "--lora.dropout", "0.2")),
    "kto": ("kto", ()),
    "dpo-precomputed": ("dpo", ("--reference", "precomputed")),
    "kto-precomputed-adapters": ("kto", (*LORA, "--reference", "precomputed")),
    "dpo-of-another": ("dpo", ("--reference-from", "reference")),
}
MESHES: dict[str, dict[str, int]] = {"one": {}, "dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folders")
    save_model(path / "model", 1)
    save_model(path / "reference", 2)
    for task in ("sft", "dpo", "kto"):
        write(path / f"{task}.jsonl", records(task, messages=True, count=22))  # type: ignore[arg-type]
    return path


def killed(run: Run) -> None:
    """The run on this rank, which dies before step `KILLED` when the checkpoint of step `SAVED` is there."""
    step = Trainer.step

    def dying(self: Trainer, number: int, *arguments: Any) -> None:
        if number == KILLED:
            end = time.monotonic() + 60
            while not (run.folder / f"checkpoint-{SAVED}").exists() and time.monotonic() < end:
                time.sleep(0.01)
            os._exit(9)
        step(self, number, *arguments)

    Trainer.step = dying  # type: ignore[method-assign]
    train_to_the_end(run)


def made(folders: Path, name: str, output: str, mesh: str, *further: str) -> tuple[Run, int]:
    task, options = CASES[name]
    options = tuple(str(folders / each) if each == "reference" else each for each in options if each)
    axes = MESHES[mesh]
    sizes = [text for axis in ("pp", "dp", "cp", "tp") for text in (f"--mesh.{axis}", str(axes.get(axis, 1)))]
    if "pp" in axes:
        sizes += ["--plan.microbatches", "2"]
    every = (*OPTIONS, *options, *sizes, *further)
    model, data = folders / "model", folders / f"{task}.jsonl"
    run = make_run(model, data, task, *every, output=folders / output, batch=4, steps=STEPS)
    return run, math.prod(axes.values())


def run_killed(pool: Pool, folders: Path, name: str, mesh: str, output: str) -> None:
    """A run that is killed."""
    run, ranks = made(folders, name, output, mesh)
    with pytest.raises(RanksFailed, match="the process died, exit code 9"):
        pool.run(killed, run, ranks=ranks)


def weights(folder: Path) -> dict[str, bytes]:
    found = {each.name: each.read_bytes() for each in (folder / "checkpoint").glob("*.safetensors")}
    assert found
    return found


def curves(folder: Path) -> list[tuple[float, float]]:
    return [(each["loss"], each["grad_norm"]) for each in read_metrics(folder)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["one", "dp2"])
@pytest.mark.parametrize("name", CASES)
def test_killed_and_resumed_is_not_killed(name: str, mesh: str, folders: Path, pool: Pool) -> None:
    whole, ranks = made(folders, name, f"{name}-{mesh}", mesh)
    pool.run(train_to_the_end, whole, ranks=ranks)
    folder = folders / f"{name}-{mesh}-killed"
    run_killed(pool, folders, name, mesh, folder.name)
    resumed, _ = made(folders, name, folder.name, mesh, "--resume")
    assert resumed.resume is not None and resumed.resume.name == f"checkpoint-{SAVED}"
    pool.run(train_to_the_end, resumed, ranks=ranks)
    assert len(curves(folder)) == STEPS
    assert curves(folder) == curves(whole.folder)
    assert weights(folder) == weights(whole.folder)


def killed_at(run: Run, work: float) -> None:
    """The run on this rank; its last rank is killed after `work` seconds of processor time."""
    victim = Victim(dist.get_world_size() - 1, work)
    with Fuse(victim, run.folder) if dist.get_rank() == victim.rank else nullcontext():
        train_to_the_end(run)


def timed(run: Run) -> float:
    """The whole run on this rank; returns its seconds of processor time."""
    before = time.process_time()
    train_to_the_end(run)
    return time.process_time() - before


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["one", "dp2"])
@pytest.mark.parametrize("name", CASES)
def test_killed_at_any_moments_is_not_killed(name: str, mesh: str, folders: Path, pool: Pool) -> None:
    """Three kills, at moments drawn from the whole run: while the model is loaded, while the reference is computed,
    in a step, while a checkpoint or the model is saved. After each, the same command is typed again.
    """
    draw, each_step = random.Random(f"{name} {mesh}"), ("--save-every", "1")
    whole, ranks = made(folders, name, f"{name}-{mesh}-calm", mesh, *each_step)
    work = min(pool.run(timed, whole, ranks=ranks))
    for kept in folders.glob(".reference-*"):
        kept.unlink()
    folder, kills = folders / f"{name}-{mesh}-troubled", 0
    for least, most in ((0.02, 0.3), (0.2, 0.6), (0.4, 0.9)):  # of the work; a warm process needs less
        run, _ = made(folders, name, folder.name, mesh, *each_step, "--resume")
        try:
            pool.run(killed_at, run, draw.uniform(least, most) * work, ranks=ranks)
        except RanksFailed as error:
            assert "SIGKILL" in str(error)
            kills += 1
        else:
            break  # the run ended before its moment
    if not (folder / "checkpoint").exists():
        run, _ = made(folders, name, folder.name, mesh, *each_step, "--resume")
        pool.run(train_to_the_end, run, ranks=ranks)
    assert kills
    assert curves(folder) == curves(whole.folder)
    assert weights(folder) == weights(whole.folder)


@pytest.mark.exhaustive
@pytest.mark.every_value
def test_a_changed_table_of_the_reference_is_refused_on_all_ranks(folders: Path, pool: Pool) -> None:
    run, ranks = made(folders, "dpo-precomputed", "table", "dp2")
    pool.run(train_to_the_end, run, ranks=ranks)
    file, checkpoint = run.folder / "reference.npy", run.folder / f"checkpoint-{SAVED}"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    resumed, _ = made(folders, "dpo-precomputed", "table-again", "dp2", "--resume", str(checkpoint))
    with pytest.raises(RanksFailed, match="2 of 2 ranks failed") as failed:
        pool.run(train_to_the_end, resumed, ranks=ranks)
    assert str(failed.value).count("cannot be used: it was changed after it was written") >= 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "mesh"),
    # stages take several microbatches, each with dropout masks of its own
    [
        (name, mesh)
        for name in CASES
        for mesh in ("tp2", "pp2", "cp2")
        if (name, mesh) != ("dpo-adapters-dropout", "pp2")
    ],
)
def test_resumed_on_another_mesh(name: str, mesh: str, folders: Path, pool: Pool) -> None:
    """The losses are those of the run that was not killed, but for rounding."""
    if not (folders / f"{name}-one/checkpoint").exists():
        pool.run(train_to_the_end, made(folders, name, f"{name}-one", "one")[0], ranks=1)
    run_killed(pool, folders, name, "one", f"{name}-to-{mesh}")
    resumed, ranks = made(folders, name, f"{name}-to-{mesh}", mesh, "--resume")
    pool.run(train_to_the_end, resumed, ranks=ranks)
    for found, truth in zip(curves(resumed.folder), curves(folders / f"{name}-one"), strict=True):
        assert found == pytest.approx(truth, rel=1e-4)
