"""Identifies the machine of a benchmark run. Only times of the same machine are comparable."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def told() -> dict[str, str | int | float]:
    """The CPU model; the number of cores available to this process; and the mean load over the last minute."""
    return {"cpu": model(), "cores": cores(), "load": round(os.getloadavg()[0], 2)}


def in_words() -> str:
    """The machine and the day, as a source of measured figures."""
    return f"{model()}, {cores()} cores, on {date.today():%d %B %Y}, load {os.getloadavg()[0]:.1f}"


def model(cpuinfo: Path = CPUINFO) -> str:
    """The CPU's model name on Linux; on other systems the architecture."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, named), platform.processor() or platform.machine())


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
