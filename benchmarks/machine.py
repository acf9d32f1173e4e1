"""What machine a run of the benchmarks is of: times of another are not its history."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def told() -> dict[str, str | int | float]:
    """The model of its CPU; the cores that this process may use; the load of the last minute, in processes that ran or waited."""
    return {"cpu": model(), "cores": cores(), "load": round(os.getloadavg()[0], 2)}


def model(cpuinfo: Path = CPUINFO) -> str:
    """As Linux calls it; elsewhere the architecture."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, named), platform.processor() or platform.machine())


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
