"""A run's checkpoints are written beside its steps: a delayed write delays the next save only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from weft.models import LlamaConfig, load_checkpoint
from weft.models.checkpoint.states import Snapshot
from weft.models.data.text import find_corpus
from weft.models.families import make_model
from weft.models.train.checkpoints import Saver
from weft.models.train.config import DataConfig, TrainConfig
from weft.models.train.folder import newest_complete
from weft.models.train.loop import train
from weft.models.train.optimizer import make_optimizer
from weft.models.train.run import Run
from weft.models.train.trainer import Trainer

from tests.models.checkpoints.states import held
from tests.support.limits import PATIENCE
from tests.support.pool import Pool

MODEL = LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, dropout=0.1)
CONFIG = TrainConfig(
    model=MODEL, steps=6, save_every=2, check=False, data=DataConfig(batch_size=4, sequence_length=8), resume="newest"
)


def run_in(folder: Path, ranks: int) -> Run:
    return Run(
        recipe="llama-tiny",
        config=CONFIG,
        corpus=find_corpus(folder / "text.txt"),
        folder=folder / "run",
        dp=ranks,
        tp=1,
    )


@dataclass
class Gate:
    """A gate where writes wait, with the number of writes that have arrived."""

    come: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    opened: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def in_each_write(self) -> Iterator[None]:
        write: Callable[..., None] = Snapshot.write

        def held_up(copy: Snapshot, *arguments: Any) -> None:
            self.come.release()
            assert self.opened.wait(PATIENCE), "nobody has opened it"
            write(copy, *arguments)

        with patch.object(Snapshot, "write", held_up):
            yield


def steps_beside_a_write(folder: Path) -> dict[str, Any]:
    run, gate = run_in(folder, 1), Gate()
    trainer = Trainer(run, torch.device("cpu"))
    trainer.report.print_line = lambda text: None  # type: ignore[method-assign]
    saver = Saver(run, trainer.model, trainer.optimizer)
    trainer.step(0)
    truth = held(trainer.model, trainer.optimizer)
    found: dict[str, Any] = {}
    with gate.in_each_write():
        saver.save(1)
        assert gate.come.acquire(timeout=PATIENCE)
        for step in range(1, 4):
            trainer.step(step)
        now = held(trainer.model, trainer.optimizer)
        found["unchanged"] = [name for name in truth if torch.equal(truth[name], now[name])]
        found["written while it was held up"] = saver.count
        later = threading.Thread(target=saver.save, args=(4,))
        later.start()
        later.join(0.1)
        found["the next waits"] = later.is_alive() and not gate.come.acquire(blocking=False)
        gate.opened.set()
        later.join(PATIENCE)
        saver.wait()
    found["written"] = saver.count
    for step, wanted in ((1, truth), (4, now)):
        model = make_model(MODEL)
        optimizer = make_optimizer(model, CONFIG.optimizer)
        load_checkpoint(model, run.folder / f"checkpoint-{step}", optimizer)
        saved = held(model, optimizer)
        found[f"others in the file of step {step}"] = [
            name for name in wanted if not torch.equal(wanted[name], saved[name])
        ]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("what was saved is whole. " * 40)
    (tmp_path / "run").mkdir()
    return tmp_path


def test_steps_go_on_while_a_write_is_held_up_and_do_not_show_in_it(folder: Path, pool: Pool) -> None:
    (found,) = pool.run(steps_beside_a_write, folder, ranks=1)
    assert found == {
        "unchanged": [],
        "written while it was held up": 0,
        "the next waits": True,
        "written": 2,
        "others in the file of step 1": [],
        "others in the file of step 4": [],
    }


def a_run_of_which_each_rank_has_named_a_folder(folder: Path) -> int:
    run = run_in(folder, 2)
    return train(replace(run, folder=folder / f"run-{dist.get_rank()}"), torch.device("cpu"))


@pytest.mark.exhaustive
def test_ranks_that_have_named_other_folders_write_into_that_of_rank_0(folder: Path, pool: Pool) -> None:
    """Ranks of a launcher name their folders by their own clocks where no folder is given."""
    assert pool.run(a_run_of_which_each_rank_has_named_a_folder, folder, ranks=2) == [0, 0]
    assert newest_complete(folder / "run-0") == (folder / "run-0/checkpoint-6", [])
    assert not (folder / "run-1").exists()


def a_run_whose_writes_wait_for_its_next_steps(folder: Path) -> list[str]:
    """A run's events in order; each checkpoint's write waits for the start of the last step before the next save."""
    gates, happened = {step: threading.Event() for step in (2, 4)}, list[str]()
    take, write = Trainer.step, Snapshot.write

    def step(trainer: Trainer, number: int, *arguments: Any) -> None:
        happened.append(f"step {number + 1}")
        if number - 1 in gates:
            gates[number - 1].set()
        take(trainer, number, *arguments)

    def held_up(copy: Snapshot, to: Path, *arguments: Any) -> None:
        number = int(to.name.rpartition("-")[2])
        assert number not in gates or gates[number].wait(PATIENCE), "the run waits for the write"
        write(copy, to, *arguments)
        happened.append(to.name)

    with patch.object(Trainer, "step", step), patch.object(Snapshot, "write", held_up):
        assert train(run_in(folder, 2), torch.device("cpu")) == 0
    return happened


@pytest.mark.exhaustive  # the sample has the case above, of the calls that the loop makes
def test_the_loop_of_a_run_waits_for_no_write_but_at_the_next(folder: Path, pool: Pool) -> None:
    for happened in pool.run(a_run_whose_writes_wait_for_its_next_steps, folder, ranks=2):
        assert [each for each in happened if each.startswith("step")] == [f"step {n}" for n in range(1, 7)]
        assert happened.index("step 4") < happened.index("checkpoint-2") < happened.index("step 5")
        assert happened.index("step 6") < happened.index("checkpoint-4") < happened.index("checkpoint-6")
