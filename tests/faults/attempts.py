"""Trainer runs in workers of the pool, in which a worker may kill itself, and the files of these runs."""

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

from tests.support.pool import Pool, RanksFailed

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
    """A file of the tests beside the run's `folder`, unknown to the run."""
    return folder.with_name(f"{folder.name}-{what}")


@dataclass(frozen=True, kw_only=True)
class Way:
    """A mesh, a plan, and a number of steps. options: further fields, which replace fields of `CONFIG`."""

    steps: int = CONFIG.steps
    sizes: dict[str, int] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return torch.Size(self.sizes.values()).numel()


# Two microbatches everywhere: dropout draws for each microbatch, so the dropped elements depend on the number.
WAYS = {
    "dp2": Way(sizes={"dp": 2, "tp": 1}, plan={"microbatches": 2}),
    "tp2-zero3-dp2": Way(sizes={"dp": 2, "tp": 2}, plan={"zero": 3, "sequence": True, "microbatches": 2}),
    "pp2": Way(sizes={"pp": 2, "dp": 1, "tp": 1}, plan={"schedule": "1f1b", "microbatches": 2, "split": "layers"}),
}


@dataclass(frozen=True)
class Victim:
    """The rank that kills itself, and when: once checkpoint `after` exists, after `work` and then a `pause`.

    work: seconds of processor time. On a busy machine, a second of wall time may be a moment of the run, or half the
    run.

    after: the step of a checkpoint. The count of `work` begins when this checkpoint exists.
    """

    rank: int
    work: float = 0.0
    pause: float = 0.0
    after: int = 0


@dataclass(frozen=True)
class Tally:
    """Counts of killed ranks, and of kills survived by runs.

    A run survives a kill if no checkpoint older than the newest before the kill is resumed, and if the run ends with
    the bits of a run without kills.
    """

    kills: int = 0
    survived: int = 0
    at_the_end: int = 0  # kills after the last checkpoint, for example while the model is exported

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.kills + other.kills, self.survived + other.survived, self.at_the_end + other.at_the_end)

    def __str__(self) -> str:
        end = f" ({self.at_the_end} after the last step)" if self.at_the_end else ""
        return f"{self.survived} of {self.kills} kills survived{end}"


class Fuse:
    """A context whose thread measures the work of this process, and kills the process at the victim's moment.

    folder: of the run. A kill adds a line to the file KILLS beside this folder.
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
        """Wait until `reached`; returns False if the context is left first."""
        while not reached():
            if self._over.wait(0.002):
                return False
        return True


def attempt(way: Way, folder: Path, victim: Victim | None = None) -> float:
    """Complete the run in `folder` from the newest checkpoint; returns this rank's seconds of processor time.

    Any folder with a checkpoint's name must be complete: a folder gets the name by a rename, after all files are
    written.
    """
    resume, wrong = newest_complete(folder)
    assert not wrong and (resume is None or resume == list(checkpoints(folder).values())[-1])
    before = time.process_time()
    mine = victim is not None and torch.distributed.get_rank() == victim.rank
    with Fuse(victim, folder) if victim is not None and mine else contextlib.nullcontext():
        assert train_from(resume, way, folder) == 0
    return time.process_time() - before


def train_from(resume: Path | None, way: Way, folder: Path) -> int:
    """Complete the run in `folder`, from the checkpoint `resume`."""
    text = folder.parent / "text.txt"
    plan, mesh = PlanConfig(**way.plan), MeshConfig(pp=way.sizes.get("pp", 1))
    config = replace(CONFIG, **{"steps": way.steps, "plan": plan, "mesh": mesh, **way.options})
    run = Run(recipe="llama-tiny", config=config, corpus=find_corpus(text), folder=folder, resume=resume, **way.sizes)
    # The plot and the samples at the end would take as long as the steps.
    without_end = patch.object(Results, "picture", return_value=""), patch.object(trainer, "SAMPLE_TOKENS", 1)
    with contextlib.redirect_stdout(io.StringIO()), without_end[0], without_end[1]:
        return train(run, torch.device("cpu"))


def complete(pool: Pool, way: Way, folder: Path) -> list[float]:
    """Runs to the end, and gives the work of each rank."""
    return pool.run(attempt, way, folder, ranks=way.ranks)


def is_killed(pool: Pool, way: Way, folder: Path, victim: Victim) -> bool:
    """Whether the victim was killed before the run completed. Raises RanksFailed for every further failure."""
    try:
        pool.run(attempt, way, folder, victim, ranks=way.ranks)
    except RanksFailed as error:
        if "SIGKILL" not in error.failures[0].what:
            raise
        return True
    return False


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "checkpoint" / "model.safetensors")


def lines(folder: Path) -> list[tuple[int, float, float]]:
    """A run's reproducible metrics: step, loss and gradient norm."""
    read = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [(each["step"], each["loss"], each["grad_norm"]) for each in read]


def assert_same(folder: Path, other: Path) -> None:
    """To the bit, and no line twice or lost."""
    assert lines(folder) == lines(other)
    found, wanted = weights(folder), weights(other)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
