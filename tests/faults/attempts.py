"""Runs of the trainer in workers of the pool, which may kill themselves, and what such a run leaves."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from weft.models import LlamaConfig
from weft.models.data.text import find_corpus
from weft.models.train import loop
from weft.models.train.config import DataConfig, MeshConfig, OptimizerConfig, PlanConfig, Run, TrainConfig
from weft.models.train.folder import newest_complete
from weft.models.train.results import METRICS, Results

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


@dataclass(frozen=True, kw_only=True)
class Way:
    """A mesh and its plan."""

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
    """The rank that kills itself, and when: seconds after it was told to begin."""

    rank: int
    seconds: float


def attempt(way: Way, folder: Path, victim: Victim | None = None) -> int:
    """The run in `folder`, from its newest checkpoint on; what `train` returns."""
    fuse = threading.Timer(0.0 if victim is None else victim.seconds, os.kill, (os.getpid(), signal.SIGKILL))
    if victim is not None and torch.distributed.get_rank() == victim.rank:
        fuse.start()
    try:
        return _train(way, folder)
    finally:
        fuse.cancel()


def _train(way: Way, folder: Path) -> int:
    text = folder.parent / "text.txt"
    config = replace(CONFIG, plan=PlanConfig(**way.plan), mesh=MeshConfig(pp=way.sizes.get("pp", 1)))
    resume = newest_complete(folder)[0]
    run = Run(recipe="llama-tiny", config=config, corpus=find_corpus(text), folder=folder, resume=resume, **way.sizes)
    # What is drawn and sampled when all is saved takes as long as the steps.
    without_end = patch.object(Results, "picture", return_value=""), patch.object(loop, "SAMPLE_TOKENS", 1)
    with contextlib.redirect_stdout(io.StringIO()), without_end[0], without_end[1]:
        return loop.train(run, torch.device("cpu"))


def complete(pool: Pool, way: Way, folder: Path) -> None:
    assert pool.run(attempt, way, folder, ranks=way.ranks) == [0] * way.ranks


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
