"""Runs of the trainer in workers of the pool, which may kill themselves, and what such a run leaves."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from weft.models import LlamaConfig
from weft.models.data.text import find_corpus
from weft.models.train import trainer
from weft.models.train.config import DataConfig, MeshConfig, OptimizerConfig, PlanConfig, TrainConfig
from weft.models.train.folder import checkpoints, newest_complete
from weft.models.train.loop import train
from weft.models.train.metrics_file import METRICS
from weft.models.train.results import Results
from weft.models.train.run import Run

from tests.support.pool import Pool

MODEL = LlamaConfig(
    vocab_size=257, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, dropout=0.1
)
CONFIG = TrainConfig(
    model=MODEL,
    steps=8,
    save_every=2,
    log_every=3,
    check=False,
    resume="newest",
    data=DataConfig(batch_size=4, sequence_length=8),
    optimizer=OptimizerConfig(warmup_steps=2),
)


KILLS = "kills"


def beside(folder: Path, what: str) -> Path:
    """A file of a run in `folder` that the run knows nothing of."""
    return folder.with_name(f"{folder.name}-{what}")


@dataclass(frozen=True, kw_only=True)
class Way:
    """A mesh and its plan, and how many steps are taken under them."""

    steps: int = CONFIG.steps
    sizes: dict[str, int] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return torch.Size(self.sizes.values()).numel()


# All of two microbatches: dropout draws for each of them, so with another number of them it drops other elements.
WAYS = {
    "dp2": Way(sizes={"dp": 2, "tp": 1}, plan={"microbatches": 2}),
    "tp2-zero3-dp2": Way(sizes={"dp": 2, "tp": 2}, plan={"zero": 3, "sequence": True, "microbatches": 2}),
    "pp2": Way(sizes={"pp": 2, "dp": 1, "tp": 1}, plan={"schedule": "1f1b", "microbatches": 2, "split": "layers"}),
}


@dataclass(frozen=True)
class Victim:
    """The rank that kills itself, and when: after so much work, in seconds of its processor, and then a pause.

    Not after so many seconds by the clock, which on a machine that others use too are now a moment and now half a run.
    after: a step; what comes first is that there is its checkpoint.
    """

    rank: int
    work: float = 0.0
    pause: float = 0.0
    after: int = 0


@dataclass(frozen=True)
class Tally:
    """How many ranks were killed, and how many of these kills their runs survived.

    A run survives a kill where what it goes on from is no older than what it had, and it ends with the bits of one that was
    never killed.
    """

    kills: int = 0
    survived: int = 0
    at_the_end: int = 0  # of the kills those after the last checkpoint, as while the model is exported

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.kills + other.kills, self.survived + other.survived, self.at_the_end + other.at_the_end)

    def __str__(self) -> str:
        end = f" ({self.at_the_end} after the last step)" if self.at_the_end else ""
        return f"{self.survived} of {self.kills} kills survived{end}"


class Fuse:
    """While it is entered a thread counts the work that this process does, and kills it when that is enough.

    folder: of the run. The file KILLS beside it then has a line more.
    """

    def __init__(self, victim: Victim, folder: Path) -> None:
        self._victim, self._folder = victim, folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._burn, daemon=True)

    def __enter__(self) -> Fuse:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _burn(self) -> None:
        after, work = self._victim.after, self._victim.work
        if not self._comes(lambda: max(checkpoints(self._folder), default=0) >= after):
            return
        end = time.process_time() + work
        if self._comes(lambda: time.process_time() >= end) and not self._over.wait(self._victim.pause):
            with beside(self._folder, KILLS).open("a") as file:
                file.write("killed\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def _comes(self, reached: Callable[[], bool]) -> bool:
        """Waits for it; whether it has come before this is left."""
        while not reached():
            if self._over.wait(0.002):
                return False
        return True


def attempt(way: Way, folder: Path, victim: Victim | None = None) -> float:
    """The run in `folder`, from its newest checkpoint on, to its end; the work that it was, in seconds of the processor.

    A folder that has the name of a checkpoint is a whole one: there has been no moment at which it was not.
    """
    resume, wrong = newest_complete(folder)
    assert not wrong and (resume is None or resume == list(checkpoints(folder).values())[-1])
    before = time.process_time()
    mine = victim is not None and torch.distributed.get_rank() == victim.rank
    with Fuse(victim, folder) if victim is not None and mine else contextlib.nullcontext():
        assert train_from(resume, way, folder) == 0
    return time.process_time() - before


def train_from(resume: Path | None, way: Way, folder: Path) -> int:
    """The run in `folder`, from that checkpoint on."""
    text = folder.parent / "text.txt"
    config = replace(CONFIG, steps=way.steps, plan=PlanConfig(**way.plan), mesh=MeshConfig(pp=way.sizes.get("pp", 1)))
    run = Run(recipe="llama-tiny", config=config, corpus=find_corpus(text), folder=folder, resume=resume, **way.sizes)
    # What is drawn and sampled when all is saved takes as long as the steps.
    without_end = patch.object(Results, "picture", return_value=""), patch.object(trainer, "SAMPLE_TOKENS", 1)
    with contextlib.redirect_stdout(io.StringIO()), without_end[0], without_end[1]:
        return train(run, torch.device("cpu"))


def complete(pool: Pool, way: Way, folder: Path) -> list[float]:
    """Runs to the end, and gives the work of each rank."""
    return pool.run(attempt, way, folder, ranks=way.ranks)


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "checkpoint" / "model.safetensors")


def lines(folder: Path) -> list[tuple[int, float, float]]:
    """The metrics of a run that are the same each time: step, loss, norm of the gradients."""
    read = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [(each["step"], each["loss"], each["grad_norm"]) for each in read]


def assert_same(folder: Path, other: Path) -> None:
    """To the bit, and no line twice or lost."""
    assert lines(folder) == lines(other)
    found, wanted = weights(folder), weights(other)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
