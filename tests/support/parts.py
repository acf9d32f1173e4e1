"""A part of the tests, where all of them take too long for each commit: several commits have then run them all."""

from __future__ import annotations

import re
import subprocess
import zlib
from pathlib import Path

COMMIT = "commit"


def read_part(text: str, repository: Path) -> tuple[int, int]:
    """(K, N) of "K/N", part K of N, counted from 1; of "commit/N" by the second in which the repository's last commit was made.

    Where git tells no commit, as in an archive, that is part 1. Raises ValueError for anything else.
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
    """Whether the test of that name is in part `part` of `parts`. It follows from the name alone."""
    return zlib.crc32(name.encode()) % parts == part - 1


def _seconds(repository: Path) -> int:
    done = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=repository, capture_output=True, text=True, check=False
    )
    return 0 if done.returncode else int(done.stdout)
