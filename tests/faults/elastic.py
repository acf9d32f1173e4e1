"""Runs whose processes torchrun's agent starts, and starts again when one of them dies."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from weft.models.train.folder import checkpoints
from weft.models.train.meeting import meet

from tests.faults.attempts import KILLS, Victim, Way, attempt, beside
from tests.support.limits import PATIENCE
from tests.support.pool import Pool

STARTS = "starts"


def survive_under_torchrun(pool: Pool, way: Way, folder: Path, victims: list[Victim]) -> int:
    """As `survive`, but one agent of torchrun starts all ranks anew, for each victim once, until they are at the end."""
    del pool  # the processes are forked from its server, which has torch
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=way.ranks,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=len(victims),
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(beside(folder, "logs")), redirects=Std.ALL),
    )
    elastic_launch(config, _attempt)(way, folder, victims)
    starts = [int(line) for line in beside(folder, STARTS).read_text().split()]
    assert starts == sorted(starts), "what a complete checkpoint holds is not lost"
    kills = len(beside(folder, KILLS).read_text().split()) if len(starts) > 1 else 0
    assert kills == len(starts) - 1, "nothing else has ended a rank"
    return kills


def _attempt(way: Way, folder: Path, victims: list[Victim]) -> None:
    """The life of a rank, from one kill to the next."""
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["RANK"] == "0":
        with beside(folder, STARTS).open("a") as file:
            file.write(f"{max(checkpoints(folder), default=0)}\n")
    dist.init_process_group("gloo", **meet(PATIENCE))
    attempt(way, folder, victims[count] if count < len(victims) else None)
    dist.destroy_process_group()
