"""A run that is told to end takes at most one more step, saves a checkpoint, and exits with a status saying why."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from weft.models import from_pretrained, read_run
from weft.models.checkpoint.states import Snapshot
from weft.models.data.text import find_corpus
from weft.models.train import launch
from weft.models.train.config import DataConfig, TrainConfig
from weft.models.train.folder import newest_complete
from weft.models.train.loop import train
from weft.models.train.recipes import recipe
from weft.models.train.results import Results
from weft.models.train.run import Run
from weft.models.train.trainer import Trainer

from tests.models.checkpoints.test_saver import MODEL
from tests.support.pool import Pool

CONFIG = TrainConfig(
    model=MODEL, steps=1000, check=False, data=DataConfig(batch_size=4, sequence_length=8), resume="newest"
)
TOLD_IN = 3  # the step in which a rank is told to end


def told_to_end(folder: Path, how: signal.Signals) -> tuple[int, list[int], list[str]]:
    """The exit status, the steps taken, and the checkpoints written after rank 1 is told to end."""
    run = Run(
        recipe="llama-tiny", config=CONFIG, corpus=find_corpus(folder / "text.txt"), folder=folder / "run", dp=2, tp=1
    )
    taken, written = list[int](), list[str]()
    take, write = Trainer.step, Snapshot.write

    def step(trainer: Trainer, number: int, *arguments: Any) -> None:
        if (number + 1, dist.get_rank()) == (TOLD_IN, 1):
            os.kill(os.getpid(), how)
        taken.append(number + 1)
        take(trainer, number, *arguments)

    def noted(copy: Snapshot, to: Path, *arguments: Any) -> None:
        written.append(to.name)
        write(copy, to, *arguments)

    with patch.object(Trainer, "step", step), patch.object(Snapshot, "write", noted):
        return train(run, torch.device("cpu")), taken, written


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)])
def test_a_signal_is_followed_by_one_step_at_most_and_one_checkpoint(
    how: signal.Signals, tmp_path: Path, pool: Pool
) -> None:
    (tmp_path / "text.txt").write_text("what was saved is whole. " * 40)
    (tmp_path / "run").mkdir()
    for status, taken, written in pool.run(told_to_end, tmp_path, how, ranks=2):
        assert status == how
        assert taken == [*range(1, TOLD_IN + 2)]
        assert written == [f"checkpoint-{TOLD_IN + 1}"]
    saved, wrong = newest_complete(tmp_path / "run")
    assert saved is not None and not wrong
    assert read_run(saved)["step"] == len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == TOLD_IN + 1


def told_to_end_as_it_exports(folder: Path) -> tuple[int, int]:
    """The exit status, and how many texts are sampled, where rank 1 is told to end after the last step."""
    config = replace(CONFIG, steps=2)
    run = Run(
        recipe="llama-tiny", config=config, corpus=find_corpus(folder / "text.txt"), folder=folder / "run", dp=2, tp=1
    )
    sampled, save = list[Trainer](), Results.save

    def told(results: Results, *arguments: Any) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        save(results, *arguments)

    with patch.object(Results, "save", told), patch.object(Trainer, "sample", lambda trainer: sampled.append(trainer)):
        return train(run, torch.device("cpu")), len(sampled)


@pytest.mark.exhaustive
def test_a_signal_is_heeded_until_the_model_is_exported(tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "text.txt").write_text("what was saved is whole. " * 40)
    (tmp_path / "run").mkdir()
    assert pool.run(told_to_end_as_it_exports, tmp_path, ranks=2) == [(signal.SIGTERM, 0)] * 2
    assert from_pretrained(tmp_path / "run/checkpoint").config.num_layers == MODEL.num_layers


def test_ranks_that_do_not_end_then_are_killed_after_thirty_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the patience alone; test_processes.py checks the killing."""
    patience = list[float]()
    monkeypatch.setattr(launch, "run_together", lambda *work, **options: patience.append(options["patience"]))
    monkeypatch.setattr("weft.models.train.launch.signal.signal", lambda *arguments: None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    run = Run(
        recipe="llama-tiny",
        config=recipe("llama-tiny"),
        corpus=find_corpus(Path(__file__)),
        folder=Path("run"),
        dp=1,
        tp=1,
    )
    assert launch.launch(run, gpus=0) == 0
    assert patience == [launch.STOP_SECONDS] == [30.0]
