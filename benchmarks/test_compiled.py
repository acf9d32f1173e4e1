"""The cost of Weft's compiled kernels: registers, spills, shared memory, and the widths of loads and stores in loops.

Kernels are compiled for a GPU which need not be present. No kernel runs.
"""

from __future__ import annotations

import re

import pytest

from benchmarks.compiled import compiled
from benchmarks.conftest import Tell

TARGET = "sm_90"


@pytest.mark.timeout(300)
def test_compiled(tell: Tell) -> None:
    pytest.importorskip("triton")
    reports = tell.measuring(compiled, TARGET)
    print(f"\ncompiled for {TARGET}{'':55}{'registers':>9}{'spills':>9}{'shared':>9}   bits in loops")
    for report in reports:
        bits = [int(number) for access in report["loop_accesses"] for number in re.findall(r"\d+", access)]
        widths = ", ".join(f"{count} {access}" for access, count in report["loop_accesses"].items())
        cost = {name: report[name] for name in ("registers", "spill_bytes", "shared_bytes")}
        print(f"{report['variant']:69}{''.join(f'{value:>9}' for value in cost.values())}   {widths}")
        widest = {"widest_loop_access_bits": max(bits)} if bits else {}
        tell(report["variant"], f"Weft, {TARGET}", "count", **cost, **widest)
    spills = {(report["variant"], TARGET): report["spill_bytes"] for report in reports if report["spill_bytes"]}
    assert spills == {}
