"""The guide to `weft check`: its commands run in order and print what it shows, before and after its change."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from weft.models.cli import main
from weft.models.train.model_class import find_class

from tests.architecture.rules import ROOT

PAGE = (ROOT / "docs/guides/guard.md").read_text().partition("```python\n")[0]  # the program has a test of its own
# A program with its file's name, a command, the output of the last command or the end of it, and a change of the
# program, in the order of the page.
BLOCK = re.compile(
    r"^```(?:\{code-block\} python\n:caption: (?P<file>\S+)\n|(?P<kind>sh|text|diff)\n)(?P<text>.*?)^```\n",
    re.DOTALL | re.MULTILINE,
)
HUNK = re.compile(r"^@@.*\n", re.MULTILINE)


def changed(program: str, diff: str) -> str:
    """The program with the hunks of a diff applied, each of which fits at one place."""
    for hunk in HUNK.split(diff)[1:]:
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in marks) for marks in (" -", " +"))
        assert program.count(before) == 1, hunk
        program = program.replace(before, after)
    return program


def write(file: Path, program: str, time: int) -> None:
    file.write_text(program)
    os.utime(file, (time, time))  # no compiled file of an earlier program is used
    sys.modules.pop(file.stem, None)
    find_class.cache_clear()


@pytest.mark.exhaustive
def test_the_commands_of_the_guide_find_its_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.setattr("weft.models.cli.settings.gpu_count", lambda: 0)
    monkeypatch.setattr("weft.models.cli.explain.gpu_count", lambda: 0)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    statuses, file, out = list[int](), tmp_path, ""
    for number, block in enumerate(BLOCK.finditer(PAGE)):
        text = block["text"].removeprefix("\n")
        if block["file"]:
            file = tmp_path / block["file"]
            write(file, text, number)
        elif block["kind"] == "diff":
            write(file, changed(file.read_text(), text), number)
        elif block["kind"] == "sh":
            program, *arguments = shlex.split(text)
            assert program == "weft"
            with pytest.raises(SystemExit) as end:
                main(arguments)
            statuses.append(int(end.value.code or 0))
            out = capsys.readouterr().out
        else:
            assert out.endswith(text)
            assert out == text or "explain" in PAGE[: block.start()].rsplit("```sh\n", 1)[1]
    assert statuses == [0, 0, 1]
