"""CI: a failure of any session fails the script .ci/run, and is shown; a weekly workflow runs the sessions left out."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.architecture.rules import ROOT, run_commands
from tests.architecture.test_run import write_script

STUB = """#!/bin/sh
[ $# -eq 0 ] && exit 0
echo "$1 begins" >> began
echo "$1 says on stdout"
echo "$1 says on stderr" >&2
[ "$1" != "$FAILS" ]
"""
SESSIONS = [words[0] for words in run_commands((ROOT / ".ci/run").read_text()) if words]


def run_ci(folder: Path, fails: str) -> tuple[int, str, list[str]]:
    """Exit status, output, and the names of the sessions that began."""
    write_script(folder / ".ci/run", (ROOT / ".ci/run").read_text())
    write_script(folder / "run", STUB)
    write_script(folder / "bin/chromium", "#!/bin/sh\n")
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "FAILS": fails,
        "TMPDIR": str(folder),
    }
    done = subprocess.run(
        [str(folder / ".ci/run")],
        cwd="/",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    began = [line.removesuffix(" begins") for line in (folder / "began").read_text().splitlines()]
    return done.returncode, done.stdout, began


def test_all_sessions_are_run_and_heard(tmp_path: Path) -> None:
    status, said, began = run_ci(tmp_path, fails="none")
    assert status == 0
    assert sorted(began) == sorted(SESSIONS)
    for session in SESSIONS:
        assert f"{session} says on stdout" in said
        assert f"{session} says on stderr" in said
    assert {path.name for path in tmp_path.iterdir()} == {".ci", "run", "bin", "began"}, "nothing else is left"


@pytest.mark.parametrize("fails", SESSIONS)
def test_a_session_that_fails_fails_all(fails: str, tmp_path: Path) -> None:
    status, said, began = run_ci(tmp_path, fails)
    assert status != 0
    assert f"{fails} says on stderr" in said
    pairs = [{"wheels", "lint"}, {"dashboard", "types"}]
    beside = next((pair for pair in pairs if fails in pair), {fails})
    assert all(f"{session} says on stdout" in said for session in beside), "the other is not cut off"
    before = SESSIONS[: max(SESSIONS.index(each) for each in beside) + 1]
    assert sorted(began) == sorted(before), "none begins after it"


WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
EVENTS = WORKFLOW[True]  # YAML reads the key `on` as true
NOT_A_FORK = "!github.event.repository.fork"


@pytest.mark.parametrize(
    ("job", "command", "condition"),
    [
        pytest.param("test", ".ci/run", "github.event_name != 'schedule'", id="commits-and-pull-requests"),
        pytest.param(
            "exhaustive",
            "./run test_exhaustive",
            f"(github.event_name == 'schedule' || github.event_name == 'workflow_dispatch') && {NOT_A_FORK}",
            id="weekly-and-by-hand",
        ),
        pytest.param(
            "first-hour", "./run test_first_hour", f"github.event_name == 'schedule' && {NOT_A_FORK}", id="weekly"
        ),
    ],
)
def test_a_job_runs_one_command(job: str, command: str, condition: str) -> None:
    """Without arguments, which would leave tests out."""
    steps = [step["run"].partition(" #")[0].strip() for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]
    assert steps == [command]
    assert WORKFLOW["jobs"][job]["if"] == f"${{{{ {condition} }}}}"


def test_the_jobs_are_these() -> None:
    assert set(WORKFLOW["jobs"]) == {"test", "exhaustive", "first-hour"}
    assert set(EVENTS) == {"push", "pull_request", "schedule", "workflow_dispatch"}


def test_scheduled_is_once_a_week() -> None:
    (when,) = EVENTS["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \d", when["cron"])
