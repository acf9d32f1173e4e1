"""`measure`: starts processes that measure this machine, and reads the `Chip`. Only these processes import torch."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..processes import listen_on_loopback, run_together
from .chip import Chip, load_chip

FOUND = "chip.toml"  # in the folder of the processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """The arguments of a measurement."""

    processes: int  # ranks on this machine: the first measures alone, then all measure together
    seconds: float  # rough duration; every measurement takes a few rounds at least
    gpus: int  # of this machine; 0 measures the CPU


def measure(measuring: Measuring) -> Chip:
    """Measure products, copies, Weft's ops, the optimizer, the host and collectives; prints a line for each.

    Called by `weft measure`. On a CPU each process has as many threads as under `weft train`.
    Communication: within the processes started here. Raises ProcessFailed if a process fails.
    """
    listen_on_loopback()
    if not measuring.gpus:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // measuring.processes)))
    with tempfile.TemporaryDirectory(prefix="weft-") as name:
        folder = Path(name)
        run_together(
            *(_work, measuring, str(folder)),
            processes=measuring.processes,
            folder=folder,
            preload=["weft.models.predict.measure_machine"],
        )
        return load_chip(folder / FOUND)


def _work(rank: int, measuring: Measuring, folder: str) -> None:
    """The body of a process."""
    from .measure_machine import measure_rank

    measure_rank(
        rank,
        Path(folder) / FOUND,
        processes=measuring.processes,
        seconds=measuring.seconds,
        gpus=measuring.gpus,
    )
