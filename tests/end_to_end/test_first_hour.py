"""A new user's first hour: this repository cloned, and every command that its README shows typed in the clone, in order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.rules import ROOT, code_blocks

README = (ROOT / "README.md").read_text()
BOOK = "It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 200
# What a command must have said, by its first words.
SAID = {
    "./run train": r"relative difference [\d.]+e[-+]\d+\n(.*\n)*saved outputs/\S+: .* for transformers",
    "./run layout": r"0:4 \| 0   \| 1   \| 2   \| 3 \|",
    "./run test": r"\d+ passed",
    "./run benchmark": r"cross_entropy: Weft's figures, and the others' over them",
    "./run dashboard": r"dashboard/index\.html",
    "./run docs": r"docs/_build/html/index\.html",
}


def commands(markdown: str) -> list[str]:
    """Those of the shell blocks, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    return [line.partition("#")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def typed(command: str, folder: Path) -> str:
    """What it says; it must succeed."""
    mine = ("PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in mine and "PYTEST" not in name}
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    sys.stdout.write(f"$ {command}\n{done.stdout}\n")  # shown where the test fails, or with --capture=no
    assert done.returncode == 0, command
    return done.stdout


@pytest.mark.first_hour
def test_a_new_users_first_hour(tmp_path: Path) -> None:
    clone = tmp_path / "weft"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    (clone / "book.txt").write_text(BOOK)
    for command in commands(README):
        said = typed(command, clone)
        expected = next(pattern for start, pattern in SAID.items() if command.startswith(start))
        assert re.search(expected, said), command
        if command == "./run train":
            (shown,) = [block for block in code_blocks(README) if block.startswith("llama-tiny: ")]
            assert not [line for line in exact(shown) if line not in said.splitlines()]
            generate = re.search(r"next +(\./run generate .*)", said)
            assert generate is not None
            assert "def " in typed(generate[1], clone)


def exact(shown: str) -> list[str]:
    """The lines of a training's output that are the same in every run: the layout and the collectives."""
    lines = shown.splitlines()
    return lines[1 : next(i for i, line in enumerate(lines) if line.startswith("check"))]


def test_commands_are_read_from_the_readme() -> None:
    text = "```sh\n./run train   # a model\n\n./run test\n```\n```text\n./run nothing\n```\n"
    assert commands(text) == ["./run train", "./run test"]
    assert {command.split()[1] for command in commands(README)} >= {"train", "test", "benchmark", "dashboard"}
    assert [command for command in commands(README) if not command.startswith(tuple(SAID))] == []
