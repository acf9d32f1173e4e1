"""How pytest-xdist shares the tests out, by `tests/conftest.py`."""

import os
import re
import subprocess
import sys

from tests.architecture.rules import ROOT

FILES = ["tests/end_to_end/test_first_hour.py", "tests/architecture/test_run.py", "tests/architecture/test_packages.py"]


def test_tests_that_start_processes_share_a_worker_and_a_file_stays_together() -> None:
    """They do not, in silence, where pytest does not fit: 9.2 ignores the groups of pytest-xdist 3.8."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadgroup", *FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    ran = set(re.findall(r"^\[(gw\d)\] .* PASSED .*@(\S+)", done.stdout, re.MULTILINE))
    assert {group for _, group in ran} == {"processes", "test_run.py", "test_packages.py"}, done.stdout
    assert len(ran) == 3, "each group on one worker"
