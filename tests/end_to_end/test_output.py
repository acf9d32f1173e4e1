"""Output, printed or not printable, never decides how a run ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.end_to_end.test_train import SMALL, WEFT
from tests.support import preloaded
from tests.support.limits import PATIENCE
from tests.support.terminal import environment, on_terminal

TINY = ("--mesh.dp", "1", "--mesh.tp", "1", "--model.num-layers", "1", "--no-check", "--data.path", "text.txt", *SMALL)
RUN = (*WEFT, "train", "--steps", "4", "--log-every", "1", "--output", "run", "--save-every", "2", *TINY)
FILES = {
    "checkpoint", "checkpoint-2", "checkpoint-4", "config.toml", "curves.svg", "metrics.jsonl", "plan.txt",
    "versions.json",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run, with its text, whose words need more than ASCII."""
    (tmp_path / "text.txt").write_text("wärp and wéft — “woven”. " * 400)
    return tmp_path


def shell(line: str, command: Sequence[str], folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """The command in a line of a shell, as "$@"."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line, "bash", *command],
        cwd=folder, env=environment(**changes), capture_output=True,
        text=True, errors="replace", timeout=PATIENCE, check=False,
    )  # fmt: skip


def is_whole(folder: Path) -> bool:
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return {each.name for each in (folder / "run").iterdir()} == FILES and (
        [json.loads(each)["step"] for each in lines] == [1, 2, 3, 4]
    )


@pytest.mark.exhaustive  # the sample has the test below
@pytest.mark.parametrize(
    ("line", "changes"),
    [
        pytest.param('"$@" | head -1', {}, id="reader-goes-away"),
        pytest.param('"$@" >/dev/full', {}, id="disk-is-full"),
        pytest.param('"$@" >/dev/full 2>&1', {}, id="disk-of-both-is-full"),
        pytest.param('"$@" >&-', {}, id="closed"),
        pytest.param('"$@" <&- >&- 2>&-', {}, id="all-closed"),
        pytest.param('"$@"', {"PYTHONIOENCODING": "ascii"}, id="ascii"),
        pytest.param(
            '"$@"',
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            id="c-locale",
        ),
        pytest.param('"$@"', {"PYTHONIOENCODING": "latin-1"}, id="latin-1"),
    ],
)  # fmt: skip
def test_a_run_ends_well_whatever_becomes_of_its_output(line: str, changes: dict[str, str], folder: Path) -> None:
    done = shell(line, RUN, folder, **changes)
    assert (done.returncode, done.stderr) == (0, "")
    assert is_whole(folder)


@pytest.mark.exhaustive
def test_a_run_whose_reader_goes_away_ends_well(folder: Path) -> None:
    with preloaded.Popen(RUN, cwd=folder, env=environment(), stdout=preloaded.PIPE, stderr=preloaded.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("llama-tiny: ")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(PATIENCE) == 0
    assert is_whole(folder)


@pytest.mark.exhaustive
def test_characters_that_an_encoding_lacks_are_question_marks(folder: Path) -> None:
    done = preloaded.run(RUN, cwd=folder, env=environment(PYTHONIOENCODING="ascii"))
    assert "  | w?rp " in done.stdout, "the sample begins with the prompt"
    assert "next  weft generate run" in done.stdout
    assert "(loss)" not in done.stdout, "no picture has its dots"


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", [1, 20, 33, 34])
def test_a_run_ends_well_on_a_narrow_terminal(columns: int, folder: Path) -> None:
    status, sent = on_terminal(
        (*RUN, "--output", str(folder / "run"), "--data.path", str(folder / "text.txt")), columns=columns
    )
    assert status == 0 and "Traceback" not in sent
    assert ("no curves are drawn" in sent) == (columns < 34)
    assert is_whole(folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("into", ["run", "other"])
def test_a_run_that_goes_on_at_its_last_step_ends_well(into: str, folder: Path) -> None:
    """In a new folder the run has no metrics."""
    assert shell('"$@"', RUN, folder).returncode == 0
    more = ("--resume", "run/checkpoint-4", *(("--output", into) if into != "run" else ()))
    done = shell('"$@"', (*WEFT, "train", *more), folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / into / "checkpoint/model.safetensors").is_file()
    assert ("no curves are drawn: no step was taken" in done.stdout) == (into == "other")


@pytest.mark.parametrize(
    ("command", "line", "status"),
    [
        pytest.param(("layout", "tp: S(0)", "--mesh", "tp=2"), '"$@" >/dev/full', 1, id="layout-full"),
        pytest.param(("--help",), '"$@" >/dev/full', 1, id="help-full"),
        pytest.param(("--version",), '"$@" | true', 141, id="version-unread", marks=pytest.mark.exhaustive),
        pytest.param(
            ("layout", "tp: S(0)", "--mesh", "tp=2"), '"$@" >&-', 0, id="layout-closed", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            ("data", "prepare", "text.txt", "--output", "out"), None, 0, id="prepare-full", marks=pytest.mark.exhaustive
        ),
    ],
)  # fmt: skip
def test_a_command_whose_work_is_its_output_says_that_it_is_lost(
    command: tuple[str, ...], line: str | None, status: int, folder: Path
) -> None:
    """line: of a shell; None for a command that is preloaded, and whose output goes to a full disk."""
    if line is None:
        with open("/dev/full", "w") as full:
            done = preloaded.run((*WEFT, *command), cwd=folder, env=environment(), stdout=full.fileno())
    else:
        done = shell(line, (*WEFT, *command), folder)
    assert done.returncode == status
    said = [f"weft {command[0]}: the output cannot be written: [Errno 28] No space left on device"]
    assert done.stderr.splitlines() == (said if status == 1 else [])


def test_nothing_is_raised_in_a_process_that_prints_on_the_side(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    program = "from weft.models.terminal import begin_printing\nbegin_printing()\nprint(1, flush=True)\nprint(2)\n"
    done = subprocess.run([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
