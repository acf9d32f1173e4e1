"""Runs the programs shown in the documentation: each in a process of its own, or on the ranks of an existing world."""

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
    """The output of the program, run by `command` in a process of its own."""
    (folder / "program.py").write_text(program)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # guides may import tests.support
    done = subprocess.run(
        [*command, "program.py"], cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_in_world(program: str, folder: Path, quickly: bool) -> str:
    """The output of the program on this rank of an existing world, which has loaded torch already.

    quickly: run compiled functions eagerly.
    """
    import torch
    import torch.distributed as dist

    printed = io.StringIO()
    existing_world: dict[str, Any] = {"init_process_group": lambda backend: None, "destroy_process_group": lambda: None}
    eager = torch.compiler.set_stance("force_eager") if quickly else contextlib.nullcontext()
    with contextlib.redirect_stdout(printed), contextlib.chdir(folder), patch.multiple(dist, **existing_world), eager:
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()
