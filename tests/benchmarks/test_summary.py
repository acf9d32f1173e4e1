"""What the benchmarks leave behind: lines on the terminal, and a file that the history takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import history, summary
from tests.benchmarks.cases import case, counted, unmeasured

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


def test_what_is_no_wefts_and_what_failed_are_told() -> None:
    cases = [
        counted("curve", "Weft, dp=2", apart=1e-6, steps=3),
        unmeasured("loss", status="failed", error="out of memory"),
    ]
    assert [" ".join(line.split()) for line in summary.lines(cases, 200)][1::2] == [
        "curve, dp=2 apart 1e-06, steps 3",
        "loss failed: out of memory",
    ]


def test_lines_are_as_wide_as_the_terminal() -> None:
    cases = [
        counted("traffic", "Weft", bytes_a_logit=6),
        *(counted("traffic", f"way {i}", bytes_a_logit=7) for i in range(30)),
    ]
    lines = list(summary.lines(cases, 110))
    assert len(lines) > 3
    assert max(map(len, lines)) <= 110


@pytest.mark.timeout(110)
def test_a_run_of_some_benchmarks_is_a_run_for_the_history(tmp_path: Path) -> None:
    """What was told is in the file that pytest-benchmark writes, and not how long the tests took."""
    file = tmp_path / "out.json"
    alone = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
    }  # of no worker of xdist
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "benchmarks", "-k", "slow_axis or mesh_time", f"--benchmark-json={file}"],
        cwd=ROOT, env={**alone, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    run = history.recorded(file)
    assert {each.group for each in run.cases} == {"mesh", "reshard_slow_axis"}, done.stdout
    assert {each.kind for each in run.cases} == {"host_time", "count"}
    assert all(each.numbers for each in run.cases)
    assert {"torch", "triton", "python"} <= run.versions.keys()
    assert "reshard_slow_axis: Weft's figures, and the others' over them" in done.stdout
