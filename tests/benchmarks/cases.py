"""Runs, and pytest-benchmark's files, that the tests of the history share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.record import Case, Run

GPU = "NVIDIA H200"
MACHINE = {"cpu": "AMD EPYC 9654", "cores": 8, "load": 0.25}


def case(name: str = "loss", way: str = "Weft", median: float = 1e-3, *, group: str = "losses", **rest: Any) -> Case:
    """A kernel's time, 1% of noise to each side."""
    figures = {"seconds_median": median, "seconds_p20": median * 0.99, "seconds_p80": median * 1.01}
    return Case(name=name, group=group, way=way, kind="time", status="measured", figures=figures | rest)


def counted(name: str = "traffic", way: str = "Weft", **figures: Any) -> Case:
    return Case(name=name, group="counts", way=way, kind="count", status="measured", figures=figures)


def unmeasured(name: str = "loss", way: str = "Weft", status: str = "failed", **figures: Any) -> Case:
    return Case(name=name, group="losses", way=way, kind="time", status=status, figures=figures)


def run(*cases: Case, minute: int = 0, **rest: Any) -> Run:
    """A run of the GPU, in a minute of its day."""
    usual: dict[str, Any] = {
        "device": GPU,
        "time": f"2026-03-01T12:{minute:02}:00Z",
        "commit": f"{minute:02}23456789abcdef",
        "dirty": False,
        "versions": {"python": "3.12.9", "torch": "2.11.0", "triton": "3.6.0"},
        "ceilings": {"copy_bytes_per_second": 4.1e12},
        "machine": MACHINE,
        "cases": cases or (case(),),
    }
    return Run(**(usual | rest))


def beside(*cases: Case, torch: float = 1e-3) -> list[Case]:
    """The cases, and torch's exact time beside each of Weft's: their ratio has the spread of Weft's own time."""
    exact = {"seconds_median": torch}
    some = {each.key[:2]: replace(each, way="torch", figures=exact) for each in cases if each.ours and each.timed}
    return [*cases, *some.values()]


def benchmark(test: str, /, *, stats: Any = None, group: str | None = "losses", **extra: Any) -> dict[str, Any]:
    """One of pytest-benchmark's records, without what nobody reads."""
    stats = stats or {"median": 2e-6, "data": [1e-6, 2e-6, 3e-6]}
    fullname = f"benchmarks/test_losses_speed.py::{test}"
    return {"name": test, "fullname": fullname, "group": group, "params": None, "stats": stats, "extra_info": extra}


def timed(test: str = "test_loss[Weft-4096]", /, **extra: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"way": "Weft", "kind": "time", "seconds_median": 1e-3}
    return benchmark(test, **(usual | extra))


def pytest_file(folder: Path, *benchmarks: dict[str, Any], name: str = "out.json", **rest: Any) -> Path:
    """What --benchmark-json writes; of a GPU, where `machine_info` says nothing else."""
    content = {
        "machine_info": {"python_version": "3.12.9", "device": GPU, "versions": {"torch": "2.11.0"}},
        "commit_info": {"id": "0123456789abcdef0123", "dirty": False},
        "benchmarks": list(benchmarks),
        "datetime": "2026-03-01T14:00:30.721824+02:00",
        "version": "5.2.3",
    }
    file = folder / name
    file.write_text(json.dumps(content | rest))
    return file
