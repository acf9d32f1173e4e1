"""The command that installs a package for this interpreter, by the tools present."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from weft.models import terminal
from weft.models.terminal import install_command


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an interpreter of its own, which nothing else of the PATH is beside."""
    python = tmp_path / "an environment/bin/python"
    python.parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    return tmp_path


def program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("there", "on_path", "has_module", "said"),
    [
        pytest.param(["an environment/bin/pip"], True, True, "pip install wandb", id="pip-of-this-environment"),
        pytest.param(["bin/pip"], True, True, "'{python}' -m pip install wandb", id="pip-of-another"),
        pytest.param([], True, True, "'{python}' -m pip install wandb", id="module-alone"),
        pytest.param(["an environment/bin/pip"], False, True, "'{python}' -m pip install wandb", id="not-on-the-path"),
        pytest.param(["bin/uv"], True, False, "uv pip install --python '{python}' wandb", id="uv"),
        pytest.param(["bin/uv"], True, True, "'{python}' -m pip install wandb", id="uv-and-pip"),
        pytest.param([], True, False, "'{python}' -m pip install wandb", id="none"),
    ],
)
def test_the_install_command_names_the_pip_or_uv_that_is_there(
    there: list[str], on_path: bool, has_module: bool, said: str, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in there:
        program(programs / each)
    if on_path:
        monkeypatch.setenv("PATH", f"{programs}/bin:{programs}/an environment/bin")
    monkeypatch.setattr(terminal, "find_spec", lambda name: object() if has_module else None)
    assert install_command("wandb") == said.format(python=sys.executable)


@pytest.mark.exhaustive
def test_the_install_command_runs_here() -> None:
    command = install_command("pip").replace(" install ", " install --dry-run --no-index ", 1)
    done = subprocess.run(command, shell=True, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "already satisfied: pip in" in done.stdout
