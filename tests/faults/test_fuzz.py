"""Damaged files of every kind, at every door, in two seeds: 10,000 cases, or as many as WEFT_FUZZ says."""

from __future__ import annotations

import os

import pytest

from tests.faults.fuzz import DOORS, run_cases, told

pytestmark = pytest.mark.faults
COUNT = int(os.environ.get("WEFT_FUZZ", "10000"))
SEED = int(os.environ.get("WEFT_SEED", "0"))


@pytest.mark.parametrize("half", [0, 1])
def test_damaged_files_end_in_the_right_answer_or_in_one_line(half: int, capsys: pytest.CaptureFixture[str]) -> None:
    seed, count = 2 * SEED + half, (COUNT + 1 - half) // 2
    counts, findings = run_cases(count, seed, list(DOORS))
    with capsys.disabled():
        print(f"\n{told(seed, count, len(DOORS), counts)}")
    assert not findings
