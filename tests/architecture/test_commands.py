"""Commands named in the documents exist, and CI runs the README's commands."""

import re
import tomllib

import pytest

from benchmarks import history
from tests.architecture.rules import ROOT, code_blocks, nox_sessions, run_commands, unknown_sessions

pytestmark = pytest.mark.every_value

SESSIONS = nox_sessions((ROOT / "noxfile.py").read_text())
PAGES = [page.relative_to(ROOT).as_posix() for page in sorted(ROOT.glob("docs/**/*.md"))]
WORKFLOWS = [file.relative_to(ROOT).as_posix() for file in sorted(ROOT.glob(".github/workflows/*.yml"))]
CI = (ROOT / ".ci/run").read_text()
DOCUMENTS = ["README.md", "CONTRIBUTING.md", ".ci/run", *WORKFLOWS, *PAGES]


def words_in_blocks(markdown: str) -> list[list[str]]:
    return [words for block in code_blocks(markdown) for words in run_commands(block)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_names_a_session(document: str) -> None:
    assert not unknown_sessions((ROOT / document).read_text(), SESSIONS)


@pytest.mark.parametrize("session", ["train", "test"])
def test_the_readme_shows_how_to(session: str) -> None:
    assert [session] in words_in_blocks((ROOT / "README.md").read_text())


def test_ci_runs_the_readmes_test_command_and_the_clean_installs() -> None:
    commands = run_commands(CI)
    assert ["test"] in commands
    assert any("wheels" in words for words in commands)


def test_every_budget_of_what_is_counted_is_checked_without_a_gpu() -> None:
    budgets = tomllib.loads((ROOT / "benchmarks/budgets.toml").read_text())["counts"]
    (chosen,) = re.findall(r"^\./run benchmark -k \"(.*)\" --benchmark-json (\S+)$", CI, re.MULTILINE)
    assert f"./run benchmark_compare {chosen[1]} --against {chosen[1]}" in CI.splitlines()
    cases = [case for case in list(history.runs("cpu").runs.values())[-1].cases if case.ours]
    groups = {case.group for case in cases for key in case.numbers if f"{case.name} {key}" in budgets}
    words = [each.partition(" and ")[0] for each in chosen[0].split(" or ")]
    assert groups and not [group for group in groups if not any(word in group for word in words)]


def test_the_run_of_a_slow_night_is_kept() -> None:
    workflow = (ROOT / ".github/workflows/gpu-benchmark.yml").read_text()
    assert "actions/cache@" not in workflow, "it saves where the job succeeds alone"
    keep, save, judge = map(workflow.index, ("run benchmark_keep", "actions/cache/save@", "run benchmark_compare"))
    assert keep < save < judge
    assert workflow[save:].splitlines()[1].strip() == "if: ${{ !cancelled() }}"
    stored = re.findall(r"actions/cache/\w+@.*?path: (\S+)\n +key: (.*?)\n", workflow, re.DOTALL)
    assert len(stored) == 2 and stored[0] == stored[1], "what is restored is what was saved"


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_workflows_call_sessions_or_the_script_and_nothing_else(workflow: str) -> None:
    commands = re.findall(r"^[ -]*run:(.*)$", (ROOT / workflow).read_text(), re.MULTILINE)
    assert commands
    assert [command for command in commands if not command.startswith((" ./run ", " .ci/run"))] == []


def test_nobody_elses_pull_request_reaches_the_gpu() -> None:
    assert "pull_request" not in (ROOT / ".github/workflows/gpu-benchmark.yml").read_text()


def test_unknown_sessions_are_caught() -> None:
    text = "Type `./run tset`, or\n```sh\n./run test\n./run train --data.path x.txt\n```\n"
    assert unknown_sessions(text, {"test", "train"}) == {"tset"}
    assert words_in_blocks(text) == [["test"], ["train", "--data.path", "x.txt"]]


def test_sessions_are_those_of_the_noxfile() -> None:
    source = "import nox\n@nox.session\ndef a(session): ...\n@nox.session(tags=[])\ndef b(session): ...\ndef c(): ...\n"
    assert nox_sessions(source) == {"a", "b"}
