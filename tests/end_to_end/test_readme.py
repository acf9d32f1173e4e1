"""The programs shown in the documents run as printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.architecture.rules import ROOT
from tests.support.pool import Pool
from tests.support.programs import TORCHRUN, as_shown_or_quickly, run_alone, run_in_world

Way = Callable[[str, Path, Pool], str]  # runs a program, and returns its output


def alone(program: str, folder: Path, pool: Pool) -> str:
    return run_alone(program, folder)


def launched(program: str, folder: Path, pool: Pool) -> str:
    return run_alone(program, folder, TORCHRUN)


def by_workers(program: str, folder: Path, pool: Pool, ranks: int = 4) -> str:
    return "".join(pool.run(run_in_world, program, folder, True, ranks=ranks))


def on_ranks(program: str, folder: Path, pool: Pool) -> str:
    """Runs on four ranks that have torch loaded; only the first page's program shows the launcher."""
    assert 'dist.init_process_group("gloo")' in program
    return by_workers(program, folder, pool)


QUICKLY: dict[Way, Way] = {alone: partial(by_workers, ranks=1), launched: by_workers, on_ranks: on_ranks}
PROGRAMS = [
    # All four ranks print the same loss; their lines may mix.
    pytest.param("README.md", [(launched, r"^(\d\.\d{4})\s*(\1\s*){3}$")], id="weft"),
    pytest.param(
        "packages/mesh/README.md",
        [(alone, r"0:5 \| 0 "), (alone, ""), (alone, "then  dp: S"), (alone, "")],
        id="mesh",
    ),
    pytest.param(
        "packages/reshard/README.md",
        [(alone, r"Exchange\(node: R, gpu: S\(1\)\): 56 bytes"), (on_ranks, r"^dp: S\(0\), tp: R$")],
        id="reshard",
    ),
    pytest.param(
        "packages/kernels/README.md",
        [(alone, ""), (on_ranks, r"^7\.\d{4}$"), (on_ranks, r"^\d+\.\d{4}$"), (alone, "")],
        id="kernels",
    ),
    pytest.param("packages/models/README.md", [(alone, r"torch.Size\(\[1, 8, 257\]\)")], id="models"),
]


@as_shown_or_quickly
@pytest.mark.parametrize(("document", "runs"), PROGRAMS)
def test_the_programs_shown_run(
    document: str, runs: list[tuple[Way, str]], quickly: bool, tmp_path: Path, pool: Pool
) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    for program, (way, output) in zip(programs, runs, strict=True):
        printed = (QUICKLY[way] if quickly else way)(program, tmp_path, pool)
        assert re.search(output, printed), printed


@pytest.mark.parametrize(
    ("document", "number"),
    [
        pytest.param("packages/mesh/README.md", 0, id="layout"),
        pytest.param("packages/mesh/README.md", 2, id="inference"),
        pytest.param("packages/reshard/README.md", 0, id="plan"),
    ],
)
def test_a_shown_output_is_the_printed_output(document: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """number: of the program, whose output stands between it and the next."""
    text = (ROOT / document).read_text()
    program = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))[number]
    shown = re.compile(r"^```text\n(.*?)^```", re.DOTALL | re.MULTILINE).search(text, program.end())
    assert shown is not None
    exec(program[1], {})
    assert capsys.readouterr().out.startswith(shown[1])
