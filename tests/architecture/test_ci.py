"""What CI runs: all that fails in the script .ci/run fails it, and is shown; what that leaves out, a workflow runs weekly."""

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
    """Exit status, output, and the sessions that began, by their first words."""
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


def commands(text: str) -> set[tuple[str, ...]]:
    """Those of a script or of a step, without the ones that make or list sessions."""
    return {tuple(words) for words in run_commands(text) if words}


def run_at(event: str) -> set[tuple[str, ...]]:
    """The commands of all jobs of the workflow that run when such an event has come about."""

    def is_run(job: dict[str, Any]) -> bool:
        condition = job.get("if", "${{ True }}")[3:-2].replace("github.event_name", repr(event))
        condition = condition.replace("!github.event.repository.fork", "True")
        return bool(eval(condition.replace("&&", "and").replace("||", "or"), {}))

    steps = [step for job in WORKFLOW["jobs"].values() if is_run(job) for step in job["steps"]]
    return {command for step in steps for command in commands(step.get("run", ""))}


SCRIPT = commands((ROOT / ".ci/run").read_text())
ALL_EXHAUSTIVE = ("test_exhaustive",)  # without arguments, which would leave some out


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        pytest.param("push", SCRIPT, id="a-commit"),
        pytest.param("pull_request", SCRIPT, id="a-pull-request"),
        pytest.param("workflow_dispatch", SCRIPT | {ALL_EXHAUSTIVE}, id="by-hand"),
        pytest.param("schedule", {ALL_EXHAUSTIVE, ("test_first_hour",)}, id="weekly"),
    ],
)
def test_the_workflow_runs_what_the_script_runs_and_once_a_week_the_rest(
    event: str, expected: set[tuple[str, ...]]
) -> None:
    assert event in WORKFLOW[True], "YAML's `on`"
    assert run_at(event) == expected


def test_scheduled_is_once_a_week() -> None:
    (when,) = WORKFLOW[True]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \d", when["cron"])
