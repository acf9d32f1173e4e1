"""Runs the programs that the documents show: a process of its own for each, or the ranks of a world that is there already."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.architecture.rules import ROOT
from tests.support.limits import PATIENCE

PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")

as_shown_or_quickly = pytest.mark.parametrize(
    "quickly",
    [
        pytest.param(True, id="by-ranks-that-have-torch"),
        pytest.param(False, id="as-shown", marks=pytest.mark.exhaustive),
    ],
)


def run_alone(program: str, folder: Path, command: Sequence[str] = PYTHON) -> str:
    """What the program prints, started by `command`."""
    (folder / "program.py").write_text(program)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # a guide may use what the tests share
    done = subprocess.run(
        [*command, "program.py"], cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_in_world(program: str, folder: Path, quickly: bool) -> str:
    """What the program prints on this rank, of a world that is there already: torch is loaded once for all programs.

    quickly: what it compiles runs as it is.
    """
    import torch
    import torch.distributed as dist

    printed = io.StringIO()
    nothing: dict[str, Any] = {"init_process_group": lambda backend: None, "destroy_process_group": lambda: None}
    eager = torch.compiler.set_stance("force_eager") if quickly else contextlib.nullcontext()
    with contextlib.redirect_stdout(printed), contextlib.chdir(folder), patch.multiple(dist, **nothing), eager:
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()
