"""A sample of the damaged files that tests/faults/test_fuzz.py tries by the thousand."""

from __future__ import annotations

import re
import sys

import pytest

from tests.architecture.rules import ROOT
from tests.support import preloaded
from tests.support.limits import PATIENCE

CASES, SEED = 42, 20


@pytest.mark.exhaustive
def test_a_sample_of_damaged_files_ends_in_the_right_answer_or_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """In a fork of a process without threads: the cases fork, and torch's threads do not survive a fork."""
    command = [sys.executable, "-m", "tests.faults.fuzz", "--count", str(CASES), "--seed", str(SEED)]
    done = preloaded.run(command, cwd=ROOT, timeout=PATIENCE)
    *findings, counts = done.stdout.splitlines()
    assert not findings, done.stdout
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(
        rf"fuzz: seed {SEED}, {CASES} cases of (\d+) doors: (\d+) read, (\d+) refused, 0 wrong", counts
    )
    assert found is not None, counts
    doors, read, refused = map(int, found.groups())
    assert 3 * doors <= CASES, "several for each door"
    assert read + refused == CASES
    assert min(read, refused) > CASES // 10, "damage is drawn that is found, and damage that changes nothing"
    with capsys.disabled():
        print(f"\n{counts}")
