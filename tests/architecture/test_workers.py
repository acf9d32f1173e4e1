"""How pytest-xdist shares the tests out, by `tests/conftest.py` and the options of `noxfile.py`."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.rules import ROOT

# The last file starts processes.
FILES = ["test_first.py", "test_second.py", "end_to_end/test_third.py"]
TESTS = "import pytest\n@pytest.mark.parametrize('number', range(3))\ndef test_a_number(number): ...\n"


def options() -> list[str]:
    """noxfile.py's options, with two workers."""
    (text,) = re.findall(r"^WORKERS = .*, (\"--dist\".*)\)$", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    return ["-n", "2", *ast.literal_eval(f"[{text}]")]


@pytest.mark.exhaustive  # depends on the versions of pytest and pytest-xdist alone, which are pinned
def test_a_file_stays_together_and_those_that_start_processes_come_first(tmp_path: Path) -> None:
    """An unfit pytest silently breaks both: pytest 9.2 ignores the groups of pytest-xdist 3.8."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    settings = ("-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}")
    command = [sys.executable, "-m", "pytest", "-v", *settings, *options(), *(str(tmp_path / name) for name in FILES)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    ran = re.findall(r"^\[(gw\d)\] .* PASSED .*@(\S+)", done.stdout, re.MULTILINE)
    assert len(ran) == 3 * len(FILES), done.stdout + done.stderr
    assert {group for _, group in ran} == set(FILES)
    assert len(set(ran)) == 3, "each group on one worker"
    (worker,) = {worker for worker, group in ran if group == FILES[-1]}
    assert next(group for name, group in ran if name == worker) == FILES[-1]
