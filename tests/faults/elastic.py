"""Runs whose processes torchrun's agent starts, and restarts when a process dies."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from weft.models.train.agreement import meet
from weft.models.train.folder import checkpoints

from tests.faults.attempts import KILLS, Tally, Victim, Way, assert_same, attempt, beside
from tests.support.limits import PATIENCE
from tests.support.pool import Pool

STARTS = "starts"


def survive_under_torchrun(pool: Pool, way: Way, folder: Path, victims: Iterable[Victim], truth: Path) -> Tally:
    """Like `survive`, but an agent of torchrun restarts all ranks, once for each victim, until the run is complete."""
    del pool  # its server forks the agent's processes, with torch loaded
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    chosen = list(victims)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=way.ranks,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=len(chosen),
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(beside(folder, "logs")), redirects=Std.ALL),
    )
    try:
        elastic_launch(config, _attempt)(way, folder, chosen)
    except ChildFailedError as error:  # more often than there were victims
        print(error)
    starts = [int(line) for line in beside(folder, STARTS).read_text().split()]
    killed = beside(folder, KILLS)
    return count_survived(way, folder, truth, starts, len(killed.read_text().split()) if killed.exists() else 0)


def count_survived(way: Way, folder: Path, truth: Path, starts: Sequence[int], kills: int) -> Tally:
    """The kills that a run survived. starts: the steps from which it was started in turn. kills: the number of kills.

    Raises an error of the comparison where no rank was killed; else prints the error, and counts the kills as lost.
    """
    try:
        assert_same(folder, truth)
        assert kills == len(starts) - 1, "nothing else has ended a rank"
    except (AssertionError, OSError) as error:
        if not kills:
            raise
        print(error)
        return Tally(kills, 0)
    lost = sum(after < before for before, after in itertools.pairwise(starts))
    return Tally(kills, kills - lost, starts[1:].count(way.steps))


def _attempt(way: Way, folder: Path, victims: list[Victim]) -> None:
    """A rank's life from one start to the next kill."""
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["RANK"] == "0":
        with beside(folder, STARTS).open("a") as file:
            file.write(f"{max(checkpoints(folder), default=0)}\n")
    dist.init_process_group("gloo", **meet(PATIENCE))
    attempt(way, folder, victims[count] if count < len(victims) else None)
    dist.destroy_process_group()
