"""Times steps of `weft train` on this machine under several plans, in turns, in two processes that stay.

A process for each run would take longer to start than to train, and a busy minute would fall on a single plan.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from types import SimpleNamespace
from typing import TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from weft.models.train.explanation import Outline
from weft.models.train.run import Run
from weft.models.train.trainer import Trainer

Name = TypeVar("Name", bound=Hashable)
STEPS = 3  # of a plan in a turn; the first does not count, because another plan's step came before


def time_steps(runs: Mapping[Name, Run], rounds: int) -> dict[Name, list[float]]:
    """Seconds of each run's steps that count, in `rounds` turns; {} on rank 1. Called on both ranks of a world.

    runs: of one or two processes. A step includes reading metrics, as under --log-every 1.
    Communication: the steps', and barriers.
    """
    rank = dist.get_rank()
    # The prediction of a step's collectives, which `weft train` prints, takes seconds for each run.
    with patch.object(Outline, "record_step", lambda *_, **__: SimpleNamespace(communication=None)):
        trainers = {name: Trainer(run, torch.device("cpu")) for name, run in runs.items() if rank < run.processes}
    for trainer in trainers.values():
        trainer.begin(0)
    counts = dict.fromkeys(runs, 0)
    found: dict[Name, list[float]] = {name: [] for name in trainers}
    for turn in range(rounds + 1):
        for name in runs:
            dist.barrier()
            if name not in trainers:
                continue
            for number in range(STEPS):
                begin = time.perf_counter()
                trainers[name].step(counts[name])
                trainers[name].read_metrics()
                counts[name] += 1
                if turn and number:
                    found[name].append(time.perf_counter() - begin)
    dist.barrier()
    return found if rank == 0 else {}
