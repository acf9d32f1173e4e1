"""The programs that the documents show run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.rules import ROOT

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
PYTHON = (sys.executable,)
PROGRAMS = [
    pytest.param(
        "README.md", [(TORCHRUN, r"^(\d\.\d{4})\s*(\1\s*){3}$")], id="weft"
    ),  # one loss, on four ranks whose lines may mix
    pytest.param(
        "packages/mesh/README.md",
        [(PYTHON, r"0:5 \| 0 "), (PYTHON, ""), (PYTHON, "then  dp: S"), (PYTHON, "")],
        id="mesh",
    ),
    pytest.param(
        "packages/reshard/README.md",
        [(PYTHON, r"Exchange\(node: R, gpu: S\(1\)\): 56 bytes"), (TORCHRUN, r"^dp: S\(0\), tp: R$")],
        id="reshard",
    ),
    pytest.param(
        "packages/kernels/README.md",
        [(PYTHON, ""), (TORCHRUN, r"^7\.\d{4}$"), (TORCHRUN, r"^\d+\.\d{4}$"), (PYTHON, "")],
        id="kernels",
    ),
    pytest.param("packages/models/README.md", [(PYTHON, r"torch.Size\(\[1, 8, 257\]\)")], id="models"),
]


@pytest.mark.parametrize(("document", "runs"), PROGRAMS)
def test_the_programs_shown_run(document: str, runs: list[tuple[tuple[str, ...], str]], tmp_path: Path) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    for program, (command, output) in zip(programs, runs, strict=True):
        (tmp_path / "program.py").write_text(program)
        done = subprocess.run(
            [*command, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        assert re.search(output, done.stdout), done.stdout


@pytest.mark.parametrize(
    ("document", "number"),
    [
        pytest.param("packages/mesh/README.md", 0, id="layout"),
        pytest.param("packages/mesh/README.md", 2, id="inference"),
        pytest.param("packages/reshard/README.md", 0, id="plan"),
    ],
)
def test_what_is_shown_is_what_is_printed(document: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """number: of the program, whose output stands between it and the next."""
    text = (ROOT / document).read_text()
    program = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))[number]
    shown = re.compile(r"^```text\n(.*?)^```", re.DOTALL | re.MULTILINE).search(text, program.end())
    assert shown is not None
    exec(program[1], {})
    assert capsys.readouterr().out.startswith(shown[1])
