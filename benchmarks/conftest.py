"""Benchmarks run on the tests' worker processes; what they find goes into pytest-benchmark's JSON, where that is asked for."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import pool

__all__ = ["pool"]

Tell = Callable[..., None]
TOLD = pytest.StashKey[list[dict[str, Any]]]()


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Tell:
    """tell(case, way, kind, **figures): one way to compute one thing, figures in SI units; see `benchmarks.history`.

    kind: "count" of what no clock measured, "host_time" of a CPU, "time" of kernels on a GPU.
    """
    group = request.path.stem.removeprefix("test_")

    def told(case: str, way: str, kind: str, *, status: str = "measured", **figures: float | str) -> None:
        extra = {"case": case, "way": way, "kind": kind, "status": status, **figures}
        benchmark = {"name": case, "group": group, "fullname": request.node.nodeid, "stats": {}, "extra_info": extra}
        request.config.stash.setdefault(TOLD, []).append(benchmark)

    return told


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: dict[str, Any]) -> None:
    """Adds what was told to what pytest-benchmark timed itself."""
    output_json["benchmarks"] += config.stash.get(TOLD, [])


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Of which device the run is, and with which versions."""
    gpu = torch.cuda.is_available()
    machine_info["device"] = torch.cuda.get_device_name() if gpu else "cpu"
    machine_info["versions"] = {"torch": torch.__version__, "triton": _triton(), "python": platform.python_version()}
    machine_info["ceilings"] = {}


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "absent"
    return str(triton.__version__)
