"""A new user's first hour: this repository is cloned, and every command of the README is typed in the clone.

First the commands of code blocks, in order; then the commands in sentences and tables.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from weft.models.step.communication import Communication, Entry
from weft.models.train.report import Report

from tests.architecture.rules import ROOT, code_blocks
from tests.end_to_end.test_exact_runs import bits_of

README = (ROOT / "README.md").read_text()
BOOK = "It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 200
NOT_HERE = {"./run measure_gpu"}  # needs a GPU
# The first words of a command -> a pattern for the command's output. Of several matching keys the longest counts.
SAID = {
    "./run train": r"relative difference [\d.]+e[-+]\d+\n(.*\n)*saved outputs/\S+: .* for transformers",
    "./run train --plan.exact": r"(?m)^saved (tall|square): .* for transformers",
    "./run compare": r"the same loss and norm in all 10 steps\nthe same bits in 10 steps, \d+ tensors each\n",
    "./run train --output my-run": r"saved my-run: .* for transformers",
    "./run train --help": r"--data\.path",
    "./run data prepare": r"prepared",
    "./run explain": r"in all +[\d,]+ bytes",
    "./run plan": r"proved by this model: ",
    "./run check --hangs": r"no rank waits for another: 4 ranks",
    "./run layout": r"0:4 \| 0   \| 1   \| 2   \| 3 \|",
    "./run test": r"\d+ passed",
    "./run benchmark": r"cross_entropy: Weft's figures, and the others' over them",
    "./run dashboard": r"dashboard/index\.html",
    "./run docs": r"docs/_build/html/index\.html",
    ".nox/weft/bin/torchrun": r"(?m)^(\d\.\d{4})\s*(\1\s*){3}$",  # a loss, on four ranks whose lines may mix
    "pip install": r"Would install .*weft-models",
}


def commands(markdown: str) -> list[str]:
    """The shell blocks' commands, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    lines = (line.partition("#")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


def inline(markdown: str) -> list[str]:
    """Commands in backticks, each once, without commands of blocks and without commands that cannot run here."""
    sentences = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"`(\./run \S[^`]*)`", sentences)
    return [command for command in dict.fromkeys(found) if command not in {*commands(markdown), *NOT_HERE}]


def expected(command: str) -> str:
    """The pattern of a command's output; a benchmark chosen by name ends with its figures."""
    chosen = re.fullmatch(r"\./run benchmark -k (\w+)", command)
    if chosen:
        return f"{chosen[1]}: Weft's figures, and the others' over them"
    return SAID[max((start for start in SAID if command.startswith(start)), key=len)]


def denied(said: str) -> list[str]:
    """Lines in which a command reports a failed check."""
    return re.findall(r"^.*\bNOT (?:within|as predicted)\b.*$", said, re.MULTILINE)


def saved(markdown: str, folder: Path) -> None:
    """Save the program of the README under the name that the README gives."""
    (program,) = re.findall(r"^```python\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    (name,) = re.findall(r"Save it as `(\S+)`", markdown)
    (folder / name).write_text(program)


def typed(command: str, folder: Path) -> str:
    """The output of a command, which must succeed."""
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
    (clone / "answers.jsonl").write_text('{"prompt": "It was the ", "completion": "best of times"}\n' * 40)
    (clone / "books").mkdir()
    (clone / "books" / "book.txt").write_text(BOOK)
    saved(README, clone)
    for command in [*commands(README), *inline(README)]:
        said = typed(command, clone)
        assert re.search(expected(command), said), command
        assert not denied(said), command
        if command == "./run train":
            (shown,) = [block for block in code_blocks(README) if block.startswith("llama-tiny: ")]
            assert not [line for line in exact(shown) if line not in said.splitlines()]
            generate = re.search(r"next +(\./run generate .*)", said)
            assert generate is not None
            assert "def " in typed(generate[1], clone)
    tall, square = (bits_of(clone / run) for run in exact_runs(commands(README)))
    assert tall == square
    (install,) = re.findall("`(pip install [^`]*)`", README)
    assert re.search(SAID["pip install"], typed(f"{sys.executable} -m {install} --dry-run", clone))


def exact_runs(typed_commands: list[str]) -> list[str]:
    """The folders of the runs with `exact`, in the order of the commands."""
    words = [command.split() for command in typed_commands if "--plan.exact" in command]
    return [each[each.index("--output") + 1] for each in words]


def exact(shown: str) -> list[str]:
    """The lines of a training's output that do not depend on the run: the layout and the collectives."""
    lines = shown.splitlines()
    return lines[1 : next(i for i, line in enumerate(lines) if line.startswith("check"))]


def test_commands_are_read_from_the_readme() -> None:
    text = "```sh\n# both\n./run train   # a model\n\n./run test\n```\n```text\n./run nothing\n```\n"
    assert commands(text) == ["./run train", "./run test"]
    assert {command.split()[1] for command in commands(README)} >= {"train", "test", "benchmark", "dashboard"}
    assert [command for command in commands(README) if not command.startswith(tuple(SAID))] == []


def test_two_meshes_with_the_same_bits_are_typed_and_compared() -> None:
    """Two runs with different meshes and folders, otherwise equal, and a command that compares the folders."""
    typed_commands = commands(README)
    first, second = (command for command in typed_commands if "--plan.exact" in command)
    runs = exact_runs(typed_commands)
    without = [re.sub(r"--(mesh\.\w+|output) \S+ ?", "", command) for command in (first, second)]
    meshes = [re.findall(r"--mesh\.\w+ \d+", command) for command in (first, second)]
    assert without[0] == without[1] and meshes[0] != meshes[1] and runs[0] != runs[1]
    assert typed_commands.index(f"./run compare {' '.join(runs)}") > typed_commands.index(second)
    same = "metrics: the same loss and norm in all 10 steps\nthe same bits in 10 steps, 164 tensors each\n"
    assert re.search(expected("./run compare tall square"), same)


def test_commands_in_sentences_and_tables_are_typed_too() -> None:
    text = (
        "Type `./run test`, `./run docs` or `./run`.\n```sh\n./run test\n```\n| `./run docs` | `./run measure_gpu` |\n"
    )
    assert inline(text) == ["./run docs"]
    assert set(inline(README)) >= {"./run docs", "./run benchmark -k step_time", "./run test tests/models -k block"}
    assert all(expected(command) for command in inline(README))
    assert expected("./run benchmark -k dispatch") == "dispatch: Weft's figures, and the others' over them"
    assert expected("./run train --help") != expected("./run train --plan.sequence")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_that_does_not_do_what_was_predicted_is_seen(dtype: str) -> None:
    report, said = Report(enabled=True), list[str]()
    report.print_line = said.append  # type: ignore[method-assign]
    predicted = Communication((Entry(phase="forward", kind="all-reduce", axes=("tp",), nbytes=8, count=1),))
    report.print_issued(predicted, predicted)
    report.check_loss(5.0, 5.0, 4, dtype)
    assert len(said) == 5
    assert denied("\n".join(said)) == []
    bound = Communication((replace(predicted.entries[0], nbytes=9, at_most=True),))
    said.clear()
    report.print_issued(bound, predicted)
    assert said[1].endswith("8 bytes  within the prediction") and denied(said[1]) == []
    said.clear()
    report.print_issued(predicted, Communication())
    report.check_loss(5.1, 5.0, 4, dtype)
    assert denied("\n".join(said)) == [said[1], said[4]]


def test_the_program_is_saved_under_the_name_that_torchrun_is_given(tmp_path: Path) -> None:
    saved(README, tmp_path)
    (command,) = (command for command in commands(README) if "torchrun" in command)
    assert "init_process_group" in (tmp_path / command.split()[-1]).read_text()
