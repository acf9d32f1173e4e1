"""The guide to fine-tuning, from a folder to a chat: its commands run in order, and its records are read."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weft.models.cli import main
from weft.models.data.examples.example import SEGMENTS
from weft.models.data.examples.source import find_examples
from weft.models.data.examples.template import find_template
from weft.models.data.tokenizer import find_tokenizer

from tests.architecture.rules import ROOT
from tests.support.limits import PATIENCE

PAGE = (ROOT / "docs/guides/fine_tune.md").read_text()
# A program with the name of its file.
FILES = re.compile(r"^```\{code-block\} python\n:caption: (\S+)\n\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
# Commands, and the output printed directly below, if it is the same everywhere.
COMMANDS = re.compile(r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
# The task and the record in a row of the table of forms.
RECORDS = re.compile(r"^\| (\w+) \| `(\{.*\})` \|$", re.MULTILINE)
RIGHT = "It is white.\n"


def run(command: str, folder: Path) -> str:
    """The output of a command of the page, which must succeed."""
    command_line, _, file = command.partition(" < ")
    program, *arguments = shlex.split(command_line)
    start = {"weft": [sys.executable, "-m", "weft.models.cli"], "python": [sys.executable]}[program]
    done = subprocess.run(
        [*start, *arguments], cwd=folder, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        input=(folder / file).read_text() if file else None, capture_output=True, text=True, timeout=PATIENCE,
        check=False,
    )  # fmt: skip
    sys.stdout.write(f"$ {command}\n{done.stdout}{done.stderr}\n")  # shown where the test fails
    assert done.returncode == 0, done.stderr
    return done.stdout


def save_files(folder: Path) -> None:
    for name, program in FILES.findall(PAGE):
        (folder / name).write_text(program)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and the examples that the page's first program makes."""
    folder = tmp_path_factory.mktemp("guide")
    save_files(folder)
    run("python make_base.py", folder)
    return folder


@pytest.mark.exhaustive
def test_paddlenlp_9412_a_folder_learns_conversations_then_preferences_by_the_commands_of_the_guide(
    tmp_path: Path,
) -> None:
    save_files(tmp_path)
    outputs: dict[str, str] = {}
    for commands, shown in COMMANDS.findall(PAGE):
        block = {command: run(command, tmp_path) for command in commands.splitlines()}
        assert not shown or "".join(block.values()) == shown
        outputs |= block
    trained = {command: out for command, out in outputs.items() if command.startswith("weft train")}
    assert len(trained) == 4
    for command, out in trained.items():
        assert "NOT" not in out, command
        before, after = map(float, re.findall(r"^loss on held-out \w+ (\S+) -> ([\d.]+)", out, re.MULTILINE)[0])
        assert after < before, command
    one, four = [re.findall(r"loss (\d\.\d{3})", out) for command, out in trained.items() if "--task sft" in command]
    assert one == four
    assert outputs["python answer.py"] == RIGHT
    (evaluated,) = [out for command, out in outputs.items() if "--reference tuned" in command]
    assert re.search(r"^reward accuracy +1$", evaluated, re.MULTILINE)


@pytest.mark.exhaustive
@pytest.mark.every_value
def test_every_option_of_the_guides_trainings_is_accepted(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run of an earlier command, the folder `base` takes the place."""
    monkeypatch.chdir(base)
    lines = [line for commands, _ in COMMANDS.findall(PAGE) for line in commands.splitlines()]
    for command in (line for line in lines if line.startswith("weft train")):
        _, *arguments = shlex.split(command.replace("--from tuned", "--from base"))
        with pytest.raises(SystemExit, match="0"):
            main([*arguments, "--print-config"])
        assert f'task = "{arguments[arguments.index("--task") + 1]}"' in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.every_value
def test_every_record_of_the_guides_table_is_an_example(base: Path, tmp_path: Path) -> None:
    tokenizer = find_tokenizer(base / "base")
    template = find_template(tokenizer, None)
    rows: list[tuple[Any, str]] = RECORDS.findall(PAGE)
    assert {task for task, _ in rows} == set(SEGMENTS) - {"pretrain"}
    for number, (task, record) in enumerate(rows):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(f"{json.dumps(json.loads(record))}\n")
        found = find_examples(path, task=task, tokenizer=tokenizer, template=template, length=64)
        learned = [each.tokens[each.learned] for each in found.read(0).segments]
        assert tokenizer.decode(learned[0].tolist()).strip().startswith("4"), record
        assert all(np.size(each) for each in learned)
