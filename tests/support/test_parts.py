"""Parts of the tests: each test is in exactly one part, and each commit chooses a part."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.support.parts import is_in, read_part


def test_each_name_is_in_one_part_and_parts_are_of_like_size() -> None:
    names = [f"tests/test_{i % 17}.py::test_one[{i}]" for i in range(3000)]
    owners = Counter(part for name in names for part in (1, 2, 3) if is_in(name, part, 3))
    assert sum(owners.values()) == len(names)
    assert min(owners.values()) > 900


def commit(folder: Path, second: int) -> None:
    when = {"GIT_AUTHOR_DATE": f"{second} +0000", "GIT_COMMITTER_DATE": f"{second} +0000", "HOME": str(folder)}
    who = ("-c", "user.name=weft", "-c", "user.email=weft@example.org")
    command = ["git", *who, "commit", "--quiet", "--allow-empty", "--message", "one"]
    subprocess.run(command, cwd=folder, env={**when, "PATH": "/usr/bin:/bin"}, check=True)


def test_a_commit_chooses_by_its_second(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    for second in range(1_700_000_000, 1_700_000_004):
        commit(tmp_path, second)
        assert read_part("commit/3", tmp_path) == (second % 3 + 1, 3)


@pytest.mark.parametrize("text", ["4/3", "0/3", "3", "a/3", "1/0", "commit/0"])
def test_a_wrong_part_is_refused(text: str, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    commit(tmp_path, 1_700_000_000)
    with pytest.raises(ValueError, match=r"--part is .*; give "):
        read_part(text, tmp_path)


def test_where_there_is_no_commit_it_is_the_first_part(tmp_path: Path) -> None:
    assert read_part("commit/3", tmp_path) == (1, 3)
    assert read_part("2/3", tmp_path) == (2, 3)
