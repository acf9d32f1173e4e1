"""The programs that the documents show run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.rules import ROOT

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4")
PROGRAMS = [
    pytest.param("README.md", TORCHRUN, r"^(\d\.\d+\n)\1{3}$", id="weft"),  # one loss, on four ranks
    pytest.param("packages/mesh/README.md", (sys.executable,), "", id="mesh"),
    pytest.param("packages/reshard/README.md", (sys.executable,), r"ReduceScatter\(axis='tp', dim=1", id="reshard"),
    pytest.param("packages/kernels/README.md", (sys.executable,), "", id="kernels"),
    pytest.param("packages/models/README.md", (sys.executable,), r"torch.Size\(\[1, 8, 257\]\)", id="models"),
]


@pytest.mark.parametrize(("document", "command", "output"), PROGRAMS)
def test_the_program_shown_runs(document: str, command: tuple[str, ...], output: str, tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [*command, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(output, done.stdout), done.stdout
