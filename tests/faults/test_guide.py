"""The guide to checkpoints, typed as it stands: from a text to transformers, with a run that is killed on the way."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.rules import ROOT

PAGE = (ROOT / "docs/guides/checkpoints.md").read_text()


@pytest.mark.exhaustive
def test_the_guide_to_checkpoints_runs_as_it_stands(tmp_path: Path) -> None:
    (commands,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (program,) = re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    shutil.copy(ROOT / "LICENSE", tmp_path)
    said = []
    for command in commands.splitlines():
        typed = re.sub(r"\bweft ", f"{sys.executable} -m weft.models.cli ", command)
        done = subprocess.run(["sh", "-c", typed], cwd=tmp_path, capture_output=True, text=True, check=False)
        if not command.startswith("timeout"):
            assert done.returncode == 0, (command, done.stderr)
        said.append(done.stdout)
    if (tmp_path / "run/metrics.jsonl").exists():
        assert "loss on held-out text" in said[3]
    assert said[4] == "made for-transformers: a folder for transformers, from run/checkpoint-40\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("You may ")
