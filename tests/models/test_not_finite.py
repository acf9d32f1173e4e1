"""Numbers that are not finite end a run, and no checkpoint saves them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from weft.models.checkpoint.states import Snapshot
from weft.models.train.config import OptimizerConfig
from weft.models.train.folder import checkpoints, newest_complete
from weft.models.train.loop import train
from weft.models.train.trainer import Trainer, TrainingError

from tests.end_to_end.test_train import SMALL, weft
from tests.models.checkpoints.test_saver import CONFIG, run_in
from tests.support.limits import PATIENCE
from tests.support.pool import Pool

TOO_FAR = OptimizerConfig(lr=1e38, weight_decay=1e3, warmup_steps=0)  # finite gradients, and weights that are not
HELPS = "A lower --optimizer.lr"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder's name occurs in the message for a silent rank: errors here must not be taken for that message."""
    folder = tmp_path / "timeout"
    (folder / "run").mkdir(parents=True)
    (folder / "text.txt").write_text("what was saved is whole. " * 40)
    return folder


def end_of(folder: Path, after: Callable[[Trainer, int], None] | None = None, **options: Any) -> str:
    """The error of a run on two ranks that ends by itself. after: called after each step, with its number."""
    run = run_in(folder, 2)
    take = Trainer.step

    def step(trainer: Trainer, number: int, *arguments: Any) -> None:
        take(trainer, number, *arguments)
        if after is not None:
            after(trainer, number + 1)

    with patch.object(Trainer, "step", step), pytest.raises(TrainingError) as ended:
        train(replace(run, config=replace(CONFIG, **options)), torch.device("cpu"))
    return str(ended.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("save_every", [0, 1])
def test_weights_that_are_not_finite_are_not_written(save_every: int, folder: Path, pool: Pool) -> None:
    options = {"steps": 1 if not save_every else 5, "save_every": save_every, "optimizer": TOO_FAR}
    for said in pool.run(ended_by_its_rate, folder, options, ranks=2):
        assert said.startswith("weights are not finite after step 1, on ranks 0, 1; last checkpoint: none;")
        assert HELPS in said
    assert not checkpoints(folder / "run") and not (folder / "run/checkpoint").exists()


def ended_by_its_rate(folder: Path, options: dict[str, Any]) -> str:
    return end_of(folder, **options)


def ended_by_a_norm(folder: Path) -> str:
    def far(trainer: Trainer, step: int) -> None:
        if step == 3:  # the loss is about 1e25, and a squared gradient overflows float32
            with torch.no_grad():
                trainer.model.norm.weight.fill_(1e25)  # type: ignore[union-attr]

    return end_of(folder, far, log_every=1)


def test_a_norm_of_gradients_that_is_not_finite_ends_the_run(folder: Path, pool: Pool) -> None:
    for said in pool.run(ended_by_a_norm, folder, ranks=2):
        assert said.startswith(f"the gradients' norm is inf at step 4; last checkpoint: {folder}/run/checkpoint-2. ")
    assert list(checkpoints(folder / "run")) == [2]


def ended_beside_a_write(folder: Path) -> str:
    """The write of step 2 goes on until the run is about to end."""
    ending = threading.Event()

    def broken(trainer: Trainer, step: int) -> None:
        if step == 3:
            with torch.no_grad():
                trainer.model.norm.weight.fill_(float("nan"))  # type: ignore[union-attr]

    write, explain = Snapshot.write, Trainer._ranks_with

    def held_up(copy: Snapshot, *arguments: Any) -> None:
        assert ending.wait(PATIENCE), "the run does not end"
        write(copy, *arguments)

    def about_to_end(trainer: Trainer, here: bool) -> str:
        ending.set()
        return explain(trainer, here)

    with patch.object(Snapshot, "write", held_up), patch.object(Trainer, "_ranks_with", about_to_end):
        return end_of(folder, broken, log_every=1)


@pytest.mark.exhaustive
def test_a_checkpoint_being_written_is_waited_for_and_named(folder: Path, pool: Pool) -> None:
    for said in pool.run(ended_beside_a_write, folder, ranks=2):
        assert f"; last checkpoint: {folder}/run/checkpoint-2. " in said
    assert newest_complete(folder / "run") == (folder / "run/checkpoint-2", [])


@pytest.mark.exhaustive  # the sample has the cases above
def test_the_command_says_so_in_a_line(folder: Path) -> None:
    rate = ("--optimizer.lr", "1e38", "--optimizer.weight-decay", "1e3", "--optimizer.warmup-steps", "0")
    mesh = ("--mesh.dp", "2", "--mesh.tp", "1", "--model.num-layers", "1")
    done = weft("train", "--steps", "1", "--output", "out", *SMALL[:4], *rate, *mesh, cwd=folder)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("weft train: weights are not finite after step 1, on ranks 0, 1;")
    assert not (folder / "out/checkpoint").exists()
