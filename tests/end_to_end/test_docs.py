"""The programs on the pages under docs/, and the quick commands, run as printed, and print what the page shows."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from weft.models.cli import main

from tests.architecture.rules import ROOT
from tests.support.pool import Pool
from tests.support.programs import as_shown_or_quickly, run_alone, run_in_world

# A program, and the output printed directly below.
PROGRAM = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
# A command that is quick enough to run here, and its output.
QUICK = re.compile(
    r"^```sh\n((?:weft|\./run) (?:(?:layout|explain) [^`]*?|train [^\n>]* --print-config\n))^```\n"
    r"\n```text\n(.*?)^```\n",
    re.DOTALL | re.MULTILINE,
)
# Commands run one after another, in a folder with this repository's licence, and their output.
DATA = re.compile(r"^```sh\n((?:weft data [^\n]*\n)+)```\n\n```text\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if PROGRAM.search(path.read_text())]
# Guides whose programs take long, and whose subjects have tests under tests/models or tests/benchmarks.
LONG = {
    *("benchmark", "checkpoints", "context", "exact", "fine_tune", "lora", "mixed_precision", "pipelines", "plans"),
    *("sharded_optimizers", "transformers", "two_models"),
}
CASES = [
    pytest.param(path, id=path.relative_to(ROOT).as_posix(), marks=[pytest.mark.exhaustive] * (path.stem in LONG))
    for path in PAGES
]


def are_interpreted() -> bool:
    """Whether the kernels of this process are, which is decided where Triton is first imported."""
    return "tests.kernels.conftest" in sys.modules and not torch.cuda.is_available()


@pytest.mark.every_value
@as_shown_or_quickly
@pytest.mark.parametrize("page", CASES)
def test_a_pages_programs_run_and_print_what_it_shows(
    page: Path, quickly: bool, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # a page may set the variable itself
    blocks = PROGRAM.findall(page.read_text())
    program = "\n".join(code for code, _ in blocks)
    if "init_process_group" in program:
        printed = pool.run(run_in_world, program, tmp_path, quickly)[0]
    elif quickly and "TRITON_INTERPRET" not in program:
        printed = pool.run(run_in_world, program, tmp_path, quickly, ranks=1)[0]
    elif quickly and are_interpreted():
        printed = run_in_world(program, tmp_path, quickly)
    else:
        printed = run_alone(program, tmp_path)
    assert printed == "".join(shown for _, shown in blocks)


COMMANDS = [
    pytest.param(command, shown, id=f"{path.stem}-{number}")
    for path in sorted((ROOT / "docs").rglob("*.md"))
    for number, (command, shown) in enumerate(QUICK.findall(path.read_text()))
]


@pytest.mark.parametrize(("command", "shown"), COMMANDS)
def test_a_command_prints_what_the_page_shows(
    command: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("weft.models.cli.settings.gpu_count", lambda: 0)
    _, *arguments = shlex.split(command)
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    assert capsys.readouterr().out == shown


def test_the_commands_of_the_guide_to_data_print_what_it_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "LICENSE", tmp_path)
    ((commands, shown),) = DATA.findall((ROOT / "docs/guides/data.md").read_text())
    for command in commands.splitlines():
        _, *arguments = shlex.split(command)
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
    assert capsys.readouterr().out == shown


def test_the_pages_show_a_layout_and_a_change_of_layout() -> None:
    assert len(COMMANDS) >= 2


@pytest.mark.every_value
@pytest.mark.parametrize("guide", sorted((ROOT / "docs/guides").glob("*.md")), ids=lambda guide: guide.stem)
def test_a_guide_has_something_that_runs(guide: Path) -> None:
    text = guide.read_text()
    # the commands of guard.md run in test_guard.py, those of compare.md in test_compare.py
    assert (
        guide.stem in ("index", "guard", "compare") or PROGRAM.search(text) or QUICK.search(text) or DATA.search(text)
    )


def test_every_kind_of_page_has_programs() -> None:
    names = {path.relative_to(ROOT / "docs").parts[0].removesuffix(".md") for path in PAGES}
    assert {"quickstart", "mesh", "reshard", "kernels", "models", "guides"} <= names


@pytest.mark.every_value
@pytest.mark.parametrize("page", sorted(path.stem for path in (ROOT / "docs/kernels").glob("*.md")))
def test_a_page_of_kernels_begins_with_their_use(page: str) -> None:
    text = (ROOT / "docs/kernels" / f"{page}.md").read_text()
    after = (text.find(mark) for mark in ("\n## ", "\n| "))
    assert all(text.index("```python") < at for at in after if at >= 0)


def test_the_quickstart_goes_on_with_the_run_that_it_shows() -> None:
    """The page's first block is the README's; its sample is drawn with the same seed after the same prompt."""
    shown, page = (ROOT / "README.md").read_text(), (ROOT / "docs/quickstart.md").read_text()
    (saved,) = re.findall(r"^saved (\S+): ", shown, re.MULTILINE)
    ((command, text),) = re.findall(
        r"^```sh\n(\./run generate .*?)\n```\n\n```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    assert command == f"./run generate {saved} --prompt 'def '"
    (sample,) = re.findall(r"^sample\n  \| (.*)$", shown, re.MULTILINE)
    assert text.startswith(f"{sample}\n")
