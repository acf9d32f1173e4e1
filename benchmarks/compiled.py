"""Costs of the compiled kernels. Works without a GPU, and in a process which interprets kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.limits import PATIENCE

ROOT = Path(__file__).parents[1]
Report = Mapping[str, Any]  # an element of the list printed by `weft.kernels.launching.aot --json`


def compiled(*target: str) -> list[Report]:
    """The reports of all kernel variants, for the named targets ("sm_90", …), or for all targets."""
    return reported("weft.kernels.launching.aot", "--json", *(word for each in target for word in ("--target", each)))


def reported(module: str, *arguments: str) -> list[Report]:
    """The reports printed by `python -m module`, run in a separate process which does not interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr
    reports: list[Report] = json.loads(run.stdout)
    return reports
