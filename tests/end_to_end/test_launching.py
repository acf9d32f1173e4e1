"""The commands of the guide to launching: `weft train` accepts each on as many processes, also a second time."""

from __future__ import annotations

import ast
import math
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from weft.models.cli.train import _complete_run
from weft.models.train.folder import CONFIG
from weft.models.train.launch import CPU_PROCESSES
from weft.models.train.run import Run
from weft.models.train.toml import as_toml

from tests.architecture.rules import ROOT

PAGE = (ROOT / "docs/guides/launching.md").read_text()
BLOCK = re.compile(r"^```(sh|yaml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TRAIN = {("weft", "train"), ("weft.models.cli", "train")}


def shown() -> Iterator[tuple[str, int | None, list[str]]]:
    """For each command that trains: the launcher, the number of processes, and the arguments of `weft train`."""
    for kind, block in BLOCK.findall(PAGE):
        for words in commands(kind, block):
            starts = [at + 2 for at, pair in enumerate(pairwise(words)) if pair in TRAIN]
            for start in starts:
                yield words[0], processes(words, block), words[start:]


def commands(kind: str, block: str) -> list[list[str]]:
    if kind == "yaml":
        return [ast.literal_eval(listed) for listed in re.findall(r"command: (\[.*?\])", block, re.DOTALL)]
    return [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]


def processes(words: list[str], block: str) -> int | None:
    """The number of processes that the launcher starts: by its options, the batch script, or the manifest around."""
    options = {
        "weft": [],
        "srun": [r"#SBATCH --nodes (\d+)", r"#SBATCH --ntasks-per-node (\d+)"],
        "mpirun": [r"-np (\d+)"],
        "torchrun": [r"nprocPerNode: \"(\d+)\"", r"replicas: (\d+)"]
        if "PyTorchJob" in block
        else [r"--nnodes (\d+)", r"--nproc-per-node (\d+)"],
    }
    told = block if words[0] == "srun" or "PyTorchJob" in block else " ".join(words)
    found = [int(number) for option in options[words[0]] for number in re.findall(option, told)]
    return math.prod(found) if found else None


COMMANDS = list(shown())


def test_every_way_to_start_it_is_shown() -> None:
    assert [(launcher, count) for launcher, count, _ in COMMANDS] == [
        ("weft", None),
        ("weft", None),
        ("torchrun", 16),
        ("srun", 16),
        ("mpirun", 8),
        ("mpirun", 16),
        ("torchrun", 16),
    ]


@pytest.fixture
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run that rank 0 makes of `weft train`'s arguments, in a folder with a text, on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("warp and weft. " * 200)
    monkeypatch.setattr("weft.models.cli.settings.gpu_count", lambda: 0)

    def settle(arguments: list[str], count: int | None) -> Run:
        if count is not None:
            monkeypatch.setenv("RANK", "0")
            monkeypatch.setenv("WORLD_SIZE", str(count))
        here = [word.replace("/shared", str(tmp_path)) for word in arguments]
        return _complete_run([*here, "--data.path", "text.txt"], None)[0]

    return settle


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("launcher", "count", "arguments"), COMMANDS, ids=[f"{at}-{launcher}" for at, (launcher, *_) in enumerate(COMMANDS)]
)
def test_a_command_is_taken_also_where_its_run_is_there(settled, launcher: str, count: int | None, arguments) -> None:
    run = settled(arguments, count)
    assert run.processes == count or (count is None and run.processes <= CPU_PROCESSES)
    if run.config.output is not None:
        run.folder.mkdir()
        (run.folder / CONFIG).write_text(as_toml(run.recipe, run.resolved))
        again = settled(arguments, count)
        assert (again.folder, again.config.save_every > 0) == (run.folder, True)


def test_the_number_of_processes_on_a_cpu_is_the_one_that_is_told() -> None:
    assert f"a process for each GPU, or {CPU_PROCESSES} on a CPU" in PAGE
