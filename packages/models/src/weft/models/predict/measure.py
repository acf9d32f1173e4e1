"""`measure`: starts processes that measure this machine, and reads the `Chip`. Only these processes import torch."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..processes import run_together
from .chip import Chip, load_chip

LOOPBACK = "lo"
FOUND = "chip.toml"  # in the folder of the processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """The arguments of a measurement.

    processes: ranks on this machine. The first measures alone, then all measure together.
    seconds: rough duration; every measurement takes a few rounds at least. gpus: of this machine; 0 measures the CPU.
    """

    processes: int
    seconds: float
    gpus: int


def measure(measuring: Measuring) -> Chip:
    """Measure products, copies, Weft's ops, the optimizer, the host and collectives; prints a line for each.

    Called by `weft measure`. On a CPU each process has as many threads as under `weft train`.
    Communication: within the processes started here. Raises ProcessFailed if a process fails.
    """
    if LOOPBACK in (name for _, name in socket.if_nameindex()):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, LOOPBACK)
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
