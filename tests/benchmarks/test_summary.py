"""What the benchmarks leave behind: lines on the terminal, and a file that the history takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import conftest, history, summary, timing
from tests.benchmarks.cases import case, counted, unmeasured
from tests.support.limits import PATIENCE

ROOT = Path(__file__).parents[2]


def test_a_line_has_wefts_figure_and_the_others_ratios_to_it() -> None:
    cases = [
        case("loss", "Weft", 1e-3, roofline=0.91),
        case("loss", "eager torch", 3e-3),
        case("loss", "Liger", 1.5e-3),
        unmeasured("loss", "CCE", "absent"),
        counted("traffic", "Weft", bytes_a_logit=6),
        counted("traffic", "Weft, one shard", bytes_a_logit=6.5, step_001=1),
    ]
    assert [" ".join(line.split()) for line in summary.lines(cases, 200)] == [
        "counts: Weft's figures, and the others' over them",
        "traffic bytes_a_logit 6; Weft, one shard 1.08",
        "losses: Weft's figures, and the others' over them",
        "loss time 1 ms; eager torch 3.00, Liger 1.50",
        "roofline 91.0%",
        "not measured: CCE",
    ]


def test_other_ways_and_failed_cases_are_told() -> None:
    cases = [
        counted("curve", "Weft, dp=2", apart=1e-6, steps=3),
        unmeasured("loss", status="failed", error="out of memory"),
    ]
    assert [" ".join(line.split()) for line in summary.lines(cases, 200)][1::2] == [
        "curve, dp=2 apart 1e-06, steps 3",
        "loss failed: out of memory",
    ]


def test_a_time_that_was_taken_in_another_manner_is_marked() -> None:
    cases = [
        case("loss", "Weft", 1e-3, timer="graph", peak_bytes=1),
        case("loss", "eager torch", 3e-3, timer="graph", peak_bytes=2),
        case("loss", "Liger", 1.5e-3, timer="events", peak_bytes=3),
    ]
    assert [" ".join(line.split()) for line in summary.lines(cases, 200)][1:] == [
        "loss time 1 ms; eager torch 3.00, Liger 1.50 by events",
        "peak_bytes 1 B; eager torch 2.00, Liger 3.00",
    ]


def test_the_ceilings_of_a_device_have_units() -> None:
    ceilings = {"copy_bytes_per_second": 4.25e12, "bf16_flop_per_second": 7.8e14}
    assert summary.of_device("NVIDIA H200", ceilings) == (
        "NVIDIA H200, at the most: copy bytes per second 4.25 TB/s, bf16 flop per second 780 Tflop/s"
    )
    assert summary.of_device("NVIDIA H200", {}) == "NVIDIA H200, at the most: not measured"


def test_a_device_that_cannot_be_measured_loses_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def ceilings() -> dict[str, float]:
        raise RuntimeError("CUDA error: out of memory\nand more")

    monkeypatch.setattr(timing, "ceilings", ceilings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    config: Any = SimpleNamespace(stash=pytest.Stash())
    machine: dict[str, Any] = {}
    conftest.pytest_benchmark_update_machine_info(config, machine)
    assert (machine["device"], machine["ceilings"]) == ("NVIDIA H200", {})
    written: dict[str, Any] = {"benchmarks": []}
    conftest.pytest_benchmark_update_json(config, [], written)
    (failed,) = map(history.case_of, written["benchmarks"])
    assert (failed.name, failed.outcome) == (
        "what the device can do",
        "failed: RuntimeError: CUDA error: out of memory",
    )
    told: list[str] = []
    conftest.pytest_terminal_summary(SimpleNamespace(write_line=told.append), config)
    assert told[0] == "NVIDIA H200, at the most: not measured"
    assert "out of memory" in " ".join(" ".join(told).split()), "on one line or on two"


def test_lines_are_as_wide_as_the_terminal() -> None:
    cases = [
        counted("traffic", "Weft", bytes_a_logit=6),
        *(counted("traffic", f"way {i}", bytes_a_logit=7) for i in range(30)),
    ]
    lines = list(summary.lines(cases, 110))
    assert len(lines) > 3
    assert max(map(len, lines)) <= 110


@pytest.mark.exhaustive
def test_a_run_of_some_benchmarks_is_a_run_for_the_history(tmp_path: Path) -> None:
    """What was told is in the file that pytest-benchmark writes, and not how long the tests took."""
    file = tmp_path / "out.json"
    # As outside a worker of xdist.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "benchmarks", "-k", "slow_axis or mesh_time", f"--benchmark-json={file}"],
        cwd=ROOT, env={**alone, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    run = history.recorded(file)
    assert {each.group for each in run.cases} == {"mesh", "reshard_slow_axis"}, done.stdout
    assert {each.kind for each in run.cases} == {"host_time", "count"}
    assert all(each.numbers for each in run.cases)
    assert {"torch", "triton", "python"} <= run.versions.keys()
    assert "reshard_slow_axis: Weft's figures, and the others' over them" in done.stdout
