"""Bytes received over the lower bound, for every pair of layouts of {R, S0, S1}: Weft's plans and DTensor's own.

A rank must receive what it needs and does not hold; the ratio is of the busiest rank's bytes to that. Layouts are those
that DTensor can say: the axes that shard one dim in the order of the mesh. Counted, not timed; planning is timed on one
CPU core. The result is kept as JSON, with a picture of it.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.mesh import Layout, ProcessMesh
from weft.reshard import plan

from benchmarks.picture import draw_ratios

SIZE = 8192
RESULTS = Path(__file__).parent / "results"
MESHES = [(2, 2), (2, 2, 2), (2, 2, 2, 2), (4, 4, 4)]


def bound(src: Sequence[str], dst: Sequence[str], sizes: Sequence[int], size: int, ndim: int = 2) -> int:
    """Elements that the busiest rank needs and does not hold: every rank's part of each dim under both layouts."""
    most = 0
    for index in itertools.product(*(range(parts) for parts in sizes)):
        need, both = 1, 1
        for dim in ("S(0)", "S(1)", "S(2)")[:ndim]:
            a, b = (interval(layout, dim, index, sizes, size) for layout in (src, dst))
            need *= b[1] - b[0]
            both *= max(0, min(a[1], b[1]) - max(a[0], b[0]))
        most = max(most, need - both)
    return most


def interval(layout: Sequence[str], dim: str, index: Sequence[int], sizes: Sequence[int], size: int) -> tuple[int, int]:
    """The part of a dim that the rank at `index` holds, where every cut is even."""
    start = 0
    for placement, position, parts in zip(layout, index, sizes, strict=True):
        if placement == dim:
            size //= parts
            start += position * size
    return start, start + size


def of_dtensor(sizes: Sequence[int]) -> dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[int, float]]:
    """Elements and seconds of each pair, counted in a process of its own, with a world that is pretended."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.redistribute", *map(str, sizes)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert found.returncode == 0, found.stderr
    return {(tuple(src), tuple(dst)): (elements, seconds) for src, dst, elements, seconds in json.loads(found.stdout)}


def of_weft(sizes: Sequence[int], src: Sequence[str], dst: Sequence[str]) -> tuple[int, float]:
    """Elements and seconds of the plan."""
    mesh = ProcessMesh.grid(**dict(zip("abcd", sizes, strict=False)))
    before, after = Layout(mesh, src), Layout(mesh, dst)
    start = time.perf_counter()
    made = plan(before, after, (SIZE, SIZE), torch.float32)
    seconds = time.perf_counter() - start
    return made.max_received_bytes // 4, seconds


def compare(sizes: Sequence[int]) -> dict[str, Any]:
    """Both engines on one mesh: the ratios of the pairs that must move something, and what the others move."""
    from benchmarks.redistribute import SIZE as COUNTED_SIZE

    theirs = of_dtensor(sizes)
    engines: dict[str, dict[str, Any]] = {
        name: {"ratios": [], "needless": 0, "seconds": []} for name in ("weft", "dtensor")
    }
    for (src, dst), (elements, seconds) in theirs.items():
        counts = {"weft": (SIZE, *of_weft(sizes, src, dst)), "dtensor": (COUNTED_SIZE, elements, seconds)}
        for name, (size, received, spent) in counts.items():
            least = bound(src, dst, sizes, size)
            engines[name]["seconds"].append(spent)
            if least:
                engines[name]["ratios"].append(received / least)
            else:
                engines[name]["needless"] += received > 0
    return {"mesh": "x".join(map(str, sizes)), "pairs": len(theirs), "engines": engines}


@pytest.mark.timeout(600)
def test_reshard_bytes_over_the_bound() -> None:
    found = [compare(sizes) for sizes in MESHES]
    print(f"\nbytes received over the lower bound, pairs of {{R, S0, S1}} layouts of {SIZE} x {SIZE} float32, counted")
    print(
        f"{'mesh':8} {'engine':8} {'pairs':>6} {'above 1':>8} {'mean':>6} {'max':>6} {'needless':>9} {'planning, us':>13}"
    )
    rows = []
    for mesh in found:
        for name, engine in mesh["engines"].items():
            ratios = engine["ratios"]
            row = {
                "mesh": mesh["mesh"],
                "engine": name,
                "pairs": mesh["pairs"],
                "share_above": sum(ratio > 1 for ratio in ratios) / len(ratios),
                "mean": statistics.mean(ratios),
                "max": max(ratios),
                "needless": engine["needless"],
                "planning_us": 1e6 * statistics.median(engine["seconds"]),
                "ratios": {str(round(r, 4)): round(ratios.count(r) / len(ratios), 6) for r in sorted(set(ratios))},
            }
            rows.append(row)
            print(
                f"{row['mesh']:8} {name:8} {row['pairs']:>6} {row['share_above']:>8.0%} {row['mean']:>6.2f} "
                f"{row['max']:>6.1f} {row['needless']:>9} {row['planning_us']:>13.0f}"
            )
    print(
        "needless: pairs that need nothing and move something; planning: median, one CPU core; DTensor's includes the call"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "reshard_bytes.json").write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    print(draw_ratios(rows, RESULTS / "reshard_bytes.svg"))
    for row in rows:
        if row["engine"] == "weft":
            assert math.isclose(row["mean"], 1.0) and math.isclose(row["max"], 1.0) and row["needless"] == 0, row


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_reshard_bytes_of_every_pair_of_a_cube(sizes: Sequence[int]) -> None:
    """{R, S0, S1, S2} of a tensor with three dims: Weft alone, every pair in the mesh's order."""
    layouts = list(itertools.product(("R", "S(0)", "S(1)", "S(2)"), repeat=len(sizes)))
    ratios, needless = [], 0
    mesh = ProcessMesh.grid(**dict(zip("abcd", sizes, strict=False)))
    for src, dst in itertools.product(layouts, repeat=2):
        made = plan(Layout(mesh, src), Layout(mesh, dst), (64, 64, 64), torch.float32)
        least = 4 * bound(src, dst, sizes, 64, ndim=3)
        if least:
            ratios.append(made.max_received_bytes / least)
        else:
            needless += made.max_received_bytes > 0
    name = "x".join(map(str, sizes))
    print(
        f"\n{name}: {len(layouts) ** 2} pairs of {{R, S0, S1, S2}}, mean {statistics.mean(ratios):.2f}, max {max(ratios):.2f}"
    )
    assert max(ratios) == min(ratios) == 1.0
    assert needless == 0
