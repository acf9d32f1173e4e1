"""How many programs a multiprocessor runs at once, computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from weft.kernels.launching.aot import occupancy, programs_at_once

KEPT = Path(__file__).parents[2] / "benchmarks/results/aot"


@pytest.mark.parametrize(
    ("target", "warps", "registers", "shared_bytes", "programs"),
    [
        # 65536 registers are 16384 a quarter. 210 a thread are 6720 a warp, 6912 in steps of 256: two warps a
        # quarter, 8 in total.
        pytest.param("sm_90", 8, 210, 0, 1, id="registers"),
        # 64 a thread are 2048 a warp: 8 a quarter, 32 in all.
        pytest.param("sm_90", 4, 64, 0, 8, id="no-rounding"),
        # 65 a thread are 2080 a warp, 2304 in steps: 7 a quarter, 28 in total, of which programs of 8 warps leave 4.
        pytest.param("sm_90", 8, 65, 0, 3, id="rounded-up"),
        # 228 KiB are 233472 bytes, and 147480 and 1024 more are 148504, in steps of 128 148608: one, and not two.
        pytest.param("sm_90", 4, 32, 147480, 1, id="shared"),
        # 163 of an A100's 164 KiB are the most for a program.
        pytest.param("sm_80", 4, 32, 163 * 1024, 1, id="all-of-an-a100s"),
        pytest.param("sm_80", 4, 32, 164 * 1024, 0, id="more-than-an-a100s"),
        pytest.param("sm_90", 4, 32, 227 * 1024, 1, id="all-of-an-h100s"),
        # 37 KiB and 1 are a sixth of 228; 128 bytes more are not.
        pytest.param("sm_100", 4, 32, 37 * 1024, 6, id="a-sixth"),
        pytest.param("sm_100", 4, 32, 37 * 1024 + 1, 5, id="less-than-a-sixth"),
        # 64 warps are 16 programs of 4; programs of 1 warp are limited to 32.
        pytest.param("sm_90", 4, 16, 0, 16, id="warps"),
        pytest.param("sm_90", 1, 16, 0, 32, id="programs"),
        # 168 a thread are 5376 a warp: three a quarter, 12 in all.
        pytest.param("sm_90", 12, 168, 0, 1, id="specialized"),
        # 255 a thread are 8160 a warp, 8192 in steps: two a quarter, 8 in all, and 9 warps are too many.
        pytest.param("sm_90", 9, 255, 0, 0, id="too-many"),
        pytest.param("gfx942", 4, 32, 0, None, id="amd"),
    ],
)
def test_programs_at_once(target: str, warps: int, registers: int, shared_bytes: int, programs: int | None) -> None:
    assert programs_at_once(target, warps, registers, shared_bytes) == programs


def test_occupancy_is_the_share_of_64_warps() -> None:
    assert occupancy("sm_90", 8, 210, 147480) == 8 / 64
    assert occupancy("sm_90", 8, 65, 0) == 24 / 64
    assert occupancy("gfx942", 8, 65, 0) is None


def test_the_kept_tables_have_the_occupancy() -> None:
    for table in KEPT.glob("triton-*.json"):
        for report in json.loads(table.read_text()):
            costs = (report[name] for name in ("target", "warps", "registers", "shared_bytes"))
            assert report["occupancy"] == occupancy(*costs), (table.name, report["variant"])
