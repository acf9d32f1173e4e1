"""Parts of the tests, where all tests take too long for each commit: several commits together run all parts."""

from __future__ import annotations

import re
import subprocess
import zlib
from pathlib import Path

COMMIT = "commit"


def read_part(text: str, repository: Path) -> tuple[int, int]:
    """(K, N) of a --part option.

    "K/N" is part K of N, counted from 1. "commit/N" chooses K by the time, in seconds, of the repository's last
    commit; K is 1 where git knows no commit, as in an archive. Raises ValueError for any other text.
    """
    found = re.fullmatch(rf"(\d+|{COMMIT})/(\d+)", text)
    if found is None:
        raise ValueError(f"--part is {text!r}; give K/N, part K of N, or {COMMIT}/N")
    parts = int(found[2])
    part = _seconds(repository) % max(1, parts) + 1 if found[1] == COMMIT else int(found[1])
    if not 1 <= part <= parts:
        raise ValueError(f"--part is {text!r}; give a part from 1 to {parts}")
    return part, parts


def is_in(name: str, part: int, parts: int) -> bool:
    """Whether the test called `name` is in part `part` of `parts`. The name alone decides."""
    return zlib.crc32(name.encode()) % parts == part - 1


def _seconds(repository: Path) -> int:
    """Time of the last commit, in seconds; 0 where git knows no commit."""
    done = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=repository, capture_output=True, text=True, check=False
    )
    return 0 if done.returncode else int(done.stdout)
