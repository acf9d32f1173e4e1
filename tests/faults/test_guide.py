"""The guide to checkpoints, typed as printed: from a text to transformers, with a run that is killed on the way."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from weft.models.train.folder import checkpoints

from tests.architecture.rules import ROOT
from tests.support.limits import PATIENCE

PAGE = (ROOT / "docs/guides/checkpoints.md").read_text()


# from which the page's run resumes; here the run may have saved a later checkpoint before the kill
SHOWN = "run/checkpoint-10"


@pytest.mark.exhaustive
def test_the_guide_to_checkpoints_runs_as_it_stands(tmp_path: Path) -> None:
    (commands,) = re.findall(r"^```sh\n(weft data.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (program,) = re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```text\n(goes on from .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    shutil.copy(ROOT / "LICENSE", tmp_path)
    prepare, begin, go_on, convert = _steps_of(commands)
    _typed(prepare, tmp_path)
    killed = _typed(begin, tmp_path)
    assert re.search(r"^step +1/40 ", killed, re.MULTILINE) and "loss on held-out text" not in killed
    before = max(checkpoints(tmp_path / "run"))
    assert 10 <= before < 40
    went_on = _typed(go_on, tmp_path)
    assert shown.replace(SHOWN, f"run/checkpoint-{before}") in went_on
    assert "mesh dp=2 x tp=2" in killed and "mesh dp=4 x tp=1" in went_on
    assert "loss on held-out text" in went_on
    metrics = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [*range(1, 41)]
    assert _typed(convert, tmp_path) == "for-transformers will be a folder for transformers, from run/checkpoint-40\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("You may ")


def _steps_of(commands: str) -> tuple[str, str, str, str]:
    """The page's lines: prepare the data, begin a run and kill it, resume, convert."""
    *prepare, begin, kill, go_on, convert = commands.splitlines()
    assert begin.endswith(" &") and "kill -KILL $!" in kill and " --resume " in go_on
    return "\n".join(prepare), f"{begin}\n{kill}", go_on, convert


def _typed(commands: str, folder: Path) -> str:
    """The output of the commands. Each succeeds, also the kill, whose target must still be running."""
    typed = re.sub(r"^weft ", f"{sys.executable} -m weft.models.cli ", commands, flags=re.MULTILINE)
    with (folder / "said").open("w+") as said:  # of a pipe the run that is killed would keep an end
        done = subprocess.run(["sh", "-c", typed], cwd=folder, stdout=said, stderr=said, check=False, timeout=PATIENCE)
        said.seek(0)
        assert done.returncode == 0, (commands, said.read())
        said.seek(0)
        return said.read()
