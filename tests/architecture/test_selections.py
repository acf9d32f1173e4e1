"""`./run test` and `./run test_exhaustive` are all tests, none twice; and nothing is tested in the second alone."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from typing import Any, get_args

import pytest
from weft.models.schedules.schedule import NAMES

from tests.architecture.collected import FOUND, described
from tests.architecture.rules import ROOT
from tests.architecture.test_reference import public_names

MARKS = ("browser", "exhaustive", "faults", "first_hour", "gpu")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
SESSION = r"def test_exhaustive\(.*\n.*\n +_pytest\(session, \"-m\", \"(.*?)\""
Test = dict[str, Any]  # see `tests.architecture.collected`


def expressions() -> tuple[str, str]:
    """The mark expressions of `test` and of `test_exhaustive`."""
    (usual,) = re.findall(r"-m '(.*)'", SETTINGS)
    (exhaustive,) = re.findall(SESSION, (ROOT / "noxfile.py").read_text())
    return usual, exhaustive


def is_selected(expression: str, marks: Iterable[str]) -> bool:
    """Whether `pytest -m expression` selects a test with these marks."""
    return _is_selected(expression, frozenset(marks).intersection(MARKS))


@functools.cache
def _is_selected(expression: str, marks: frozenset[str]) -> bool:
    return bool(eval(expression, {}, {mark: mark in marks for mark in MARKS}))


@pytest.fixture(scope="module")
def every_test(pytestconfig: pytest.Config) -> list[Test]:
    if (found := pytestconfig.stash.get(FOUND, None)) is not None:
        return described(found)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "tests.architecture.collected"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tests: list[Test] = json.loads(done.stdout)
    return tests


@pytest.fixture(scope="module")
def sampled(every_test: list[Test]) -> list[Test]:
    """The tests that `./run test` selects."""
    usual, _ = expressions()
    return [test for test in every_test if is_selected(usual, test["marks"])]


def test_each_test_is_in_one_of_the_two(every_test: list[Test]) -> None:
    usual, exhaustive = expressions()
    assert len({test["name"] for test in every_test}) == len(every_test) > 4000
    for test in every_test:
        counts = is_selected(usual, test["marks"]) + is_selected(exhaustive, test["marks"])
        assert counts == (not {"gpu", "browser", "first_hour", "faults"} & set(test["marks"])), test


def test_no_function_is_left_out_but_those_marked_by_hand(every_test: list[Test], sampled: list[Test]) -> None:
    exhaustive = [test for test in every_test if is_selected(expressions()[1], test["marks"])]
    functions = {test["name"].partition("[")[0] for test in exhaustive if not test["by_hand"]}
    assert functions <= {test["name"].partition("[")[0] for test in sampled}


@pytest.mark.parametrize("package", ["kernels", "mesh/infer"])
def test_every_op_and_every_rule_is_sampled(sampled: list[Test], package: str) -> None:
    (source,) = ROOT.glob(f"packages/*/src/weft/{package}/__init__.py")
    names = {f"weft.{package.replace('/', '.')}.{name}" for name in public_names(source.read_text())}
    assert len(names) > 10
    assert names - {name for test in sampled for name in test["uses"]} == set()


def test_every_step_of_a_plan_is_sampled(sampled: list[Test]) -> None:
    from weft.reshard import Step

    steps = {f"weft.reshard.{step.__name__}" for step in get_args(Step)}
    assert len(steps) >= 10
    assert steps - {name for test in sampled if "tests/reshard/" in test["name"] for name in test["uses"]} == set()


@pytest.mark.every_value
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt", "mixtral", "qwen3-moe"])
def test_every_family_is_sampled_on_processes(sampled: list[Test], family: str) -> None:
    assert any(family in parameters for parameters in of_models_on_processes(sampled))


@pytest.mark.every_value
@pytest.mark.parametrize("level", range(4))
def test_every_level_of_zero_is_sampled_on_processes(sampled: list[Test], level: int) -> None:
    assert any(f"zero{level}" in parameters for parameters in of_models_on_processes(sampled))


@pytest.mark.every_value
@pytest.mark.parametrize("schedule", NAMES)
def test_every_schedule_is_sampled_on_processes(sampled: list[Test], schedule: str) -> None:
    spellings = (schedule, schedule.replace("_", "-"))
    assert any(each in parameters for parameters in of_models_on_processes(sampled) for each in spellings)


@pytest.mark.every_value
@pytest.mark.parametrize("axis", ["pp", "dp", "cp", "tp", "ep"])
def test_every_axis_is_sampled_on_processes(sampled: list[Test], axis: str) -> None:
    assert any(f"{axis}2" in parameters for parameters in of_models_on_processes(sampled))


def of_models_on_processes(tests: list[Test]) -> list[str]:
    """The parameters in the names of tests of models on several processes."""
    names = [test["name"] for test in tests if test["on_processes"] and test["name"].startswith("tests/models/")]
    assert len(names) > 100
    return [name.partition("[")[2].lower() for name in names]


def kernels_of(launch: str, kernel: str) -> set[str]:
    """The Triton kernels that a launch.py takes from its kernel.py, by the sources of both."""
    jitted = {
        node.name
        for node in ast.parse(kernel).body
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)
    }
    taken = {
        node.attr
        for node in ast.walk(ast.parse(launch))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kernel"
    }
    return jitted & taken


def test_every_kernel_is_sampled(sampled: list[Test]) -> None:
    launches = {
        f"{path.parent.name}.{kernel}"
        for path in ROOT.glob("packages/kernels/src/weft/kernels/*/launch.py")
        for kernel in kernels_of(path.read_text(), (path.parent / "kernel.py").read_text())
    }
    assert len(launches) > 20
    names = [test["name"] for test in sampled if "::test_a_kernel_is_launched[" in test["name"]]
    assert launches == {name.partition("[")[2].removesuffix("]") for name in names}


def test_the_kernels_of_a_launch_are_found() -> None:
    kernel = "@triton.jit\ndef a(): b()\n@triton.jit\ndef b(): ...\n@triton.jit(x=1)\ndef c(): ...\ndef d(): ...\n"
    assert kernels_of("kernel.a[1](); fill(kernel.c); kernel.d()", kernel) == {"a", "c"}


def numbers_of_anchors(tests: list[Test]) -> set[str]:
    names = [test["name"].rpartition("::")[2].partition("[")[0] for test in tests]
    return {number for name in names if name.startswith("test_anchor") for number in re.findall(r"\d+", name)}


def test_every_numbered_failure_is_sampled(every_test: list[Test], sampled: list[Test]) -> None:
    assert (
        numbers_of_anchors(sampled)
        == numbers_of_anchors(every_test)
        >= {str(number) for number in (*range(1, 13), *range(21, 33))}
    )
    assert numbers_of_anchors([{"name": "a.py::test_anchors_8_and_17_are_met[20]"}]) == {"8", "17"}


def test_an_expression_selects_by_marks() -> None:
    assert is_selected("exhaustive and not gpu", ["exhaustive", "timeout"])
    assert not is_selected("exhaustive and not gpu", ["exhaustive", "gpu"])
