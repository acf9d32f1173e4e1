"""The benchmarks and the GPU tests need only packages of a bare machine with a GPU.

These are torch, triton, numpy, pytest, pytest-benchmark and their dependencies.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.architecture.rules import ROOT
from tests.support.limits import PATIENCE

PROGRAM = """
import re, sys
from importlib import metadata

def name_of(requirement):
    return re.match(r"[\\w.-]+", requirement)[0].lower().replace("_", "-")

here = {name_of(each.metadata["Name"]): each for each in metadata.distributions()}
wanted, needed = ["torch", "triton", "numpy", "pytest", "pytest-benchmark"], set()
while wanted:
    name = wanted.pop()
    if name in here and name not in needed:
        needed.add(name)
        wanted += [name_of(each) for each in here[name].requires or () if "extra ==" not in each]
absent = {
    package for package, owners in metadata.packages_distributions().items()
    if not needed & set(map(name_of, owners)) and package not in ("weft", "tests", "benchmarks")
}

class Bare:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Bare, sys.meta_path)
assert {"hypothesis", "rich"} <= absent, absent
import pytest
sys.exit(pytest.main([*sys.argv[1:], "-p", "pytest_benchmark.plugin"]))
"""


def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.mark.exhaustive
def test_a_bare_machine_collects_all_benchmarks_and_runs_one() -> None:
    done = bare("benchmarks", "-k", "slow_axis", "-q")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.exhaustive  # collects thousands; the sample has the benchmarks, which import as much
def test_a_bare_machine_collects_the_tests_that_need_a_gpu() -> None:
    done = bare("tests/kernels", "-q", "--collect-only", "-m", "gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_values.py" in done.stdout


@pytest.mark.exhaustive
def test_packages_absent_on_a_bare_machine_cannot_be_imported() -> None:
    done = bare("tests/support/test_sample.py", "-q", "--collect-only")
    assert "No module named 'hypothesis'" in done.stdout + done.stderr
