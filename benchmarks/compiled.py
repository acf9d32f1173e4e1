"""What the kernels cost once compiled, whether or not there is a GPU, and whether or not they are interpreted here."""

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
Report = Mapping[str, Any]  # one of `weft.kernels.launching.aot --json`


def compiled(*target: str) -> list[Report]:
    """The reports of all variants, for all targets or for those named: "sm_90", …"""
    return reported("weft.kernels.launching.aot", "--json", *(word for each in target for word in ("--target", each)))


def reported(module: str, *arguments: str) -> list[Report]:
    """What `python -m module` prints, as a process of its own, in which kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr
    reports: list[Report] = json.loads(run.stdout)
    return reports
