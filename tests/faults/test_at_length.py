"""`./run test_faults`: so many kills that every moment of a run, saving and reading included, has had some. WEFT_KILLS says how many."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.attempts import WAYS, assert_same
from tests.faults.test_kills import survive
from tests.support.pool import Pool

KILLS = int(os.environ.get("WEFT_KILLS", "100"))


@pytest.mark.faults
@pytest.mark.parametrize("name", WAYS)
def test_runs_survive_many_kills(name: str, tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "text.txt").write_text("what was saved is whole. " * 40)
    wanted, survived, runs = -(-KILLS // len(WAYS)), 0, 0
    while survived < wanted:
        folder = tmp_path / str(runs)
        folder.mkdir()
        (folder / "text.txt").write_text((tmp_path / "text.txt").read_text())
        survived += survive(pool, WAYS[name], folder / "run", wanted - survived, seed=runs)
        assert_same(folder / "run", folder / "truth")
        runs += 1
    print(f"\n{name}: {survived} of {survived} kills survived, in {runs} runs of the bits of one that was not killed")
