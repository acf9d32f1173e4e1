"""The guide to exact runs: commands print the shown output, and each row of the table of refusals is refused so."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from weft.models.cli import main
from weft.models.train.digests import end_of_bits
from weft.models.train.saved_run import ARITHMETIC

from tests.architecture.rules import ROOT
from tests.support import preloaded

PAGE = (ROOT / "docs/guides/exact.md").read_text()
REFUSED = re.findall(r"^\| `([^`]*--plan\.exact [^`]*)` \| `([^`]+)` \|", PAGE, re.MULTILINE)


@pytest.mark.few(1)
@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[options for options, _ in REFUSED])
def test_options_refused_by_the_guide_are_refused(
    options: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.models.cli.settings.gpu_count", lambda: 0)
    with pytest.raises(SystemExit, match="2"):
        main(["train", *shlex.split(options)])
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) == 1


def test_the_guide_has_the_table_of_refusals() -> None:
    assert len(REFUSED) >= 8


def test_a_run_resumed_with_other_threads_prints_the_line_of_the_guide() -> None:
    facts = {"exact": "dp=4,tp=2", "torch": "2.13.0", "device": "cpu", "instructions": "AVX512", "threads": 1}
    assert end_of_bits({"config": {}, ARITHMETIC: facts}, facts, 50) == []
    (line,) = end_of_bits({"config": {}, ARITHMETIC: facts}, facts | {"threads": 2}, 50)
    assert f"```text\n{line}\n```\n" in PAGE


@pytest.mark.exhaustive  # starts processes twice
def test_the_commands_of_the_guide_print_what_it_shows(tmp_path: Path) -> None:
    (commands,) = re.findall(r"^```sh\n(weft train.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    printed = []
    for command in commands.splitlines():
        _, *arguments = shlex.split(command)
        done = preloaded.run((sys.executable, "-m", "weft.models.cli", *arguments), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
    assert f"```text\n{printed[-1]}```\n" in PAGE
    tall, square = (tmp_path / name / "checkpoint" / "model.safetensors" for name in ("tall", "square"))
    assert tall.read_bytes() == square.read_bytes()
