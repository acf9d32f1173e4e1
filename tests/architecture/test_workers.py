"""How pytest-xdist shares the tests out, by `tests/conftest.py` and the options of `noxfile.py`."""

import ast
import os
import re
import subprocess
import sys

from tests.architecture.rules import ROOT

# The last one starts processes.
FILES = ["tests/architecture/test_run.py", "tests/benchmarks/test_report.py", "tests/end_to_end/test_first_hour.py"]


def options() -> list[str]:
    """Those of noxfile.py, with two workers."""
    (text,) = re.findall(r"^WORKERS = .*, (\"--dist\".*)\)$", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    return ["-n", "2", *ast.literal_eval(f"[{text}]")]


def test_a_file_stays_together_and_those_that_start_processes_come_first() -> None:
    """They do not, in silence, where pytest does not fit: 9.2 ignores the groups of pytest-xdist 3.8."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-v", *options(), *FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    ran = re.findall(r"^\[(gw\d)\] .* PASSED .*@(\S+)", done.stdout, re.MULTILINE)
    assert {group for _, group in ran} == set(FILES), done.stdout
    assert len(set(ran)) == 3, "each group on one worker"
    (worker,) = {worker for worker, group in ran if group == FILES[-1]}
    assert next(group for name, group in ran if name == worker) == FILES[-1]
