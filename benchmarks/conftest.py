"""Fixtures of the benchmarks. Results are written to pytest-benchmark's JSON, and printed as a table at the end.

Benchmarks run on the tests' worker processes.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import history, machine, summary, timing
from benchmarks.failures import Failures
from benchmarks.measure_gpu import UNFINISHED
from tests.support.fixtures import pool

__all__ = ["Tell", "Time", "pool"]

P = ParamSpec("P")
T = TypeVar("T")
MACHINE = machine.told()  # taken before the benchmarks themselves load the machine
TOLD = pytest.StashKey[list[dict[str, Any]]]()
COPY_AND_MATMUL = "torch: a copy, and a matmul"
CEILINGS = pytest.StashKey[Mapping[str, float]]()
TIME = pytest.StashKey["Time"]()


class Time:
    """The time limit of a run (None: no limit). over: whether a case was left out because the time was over."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else clock.monotonic() + seconds
        self.over = False

    def while_it_lasts(self, cases: Iterable[T]) -> Iterator[T]:
        """Yields cases until the time is over."""
        for case in cases:
            if self._end is not None and clock.monotonic() >= self._end:
                self.over = True
                return
            yield case


class Tell:
    """`tell(case, way, kind, **figures)` records the figures of one way to compute a case; see `benchmarks.history`.

    kind: "count" for counted figures, "host_time" for times of a CPU, "time" for times of kernels on a GPU.
    figures: in SI units.
    """

    def __init__(self, request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> None:
        self._group = request.path.stem.removeprefix("test_")
        self._test, self._benchmark = request.node.nodeid, benchmark
        self._told = request.config.stash.setdefault(TOLD, [])

    def __call__(self, case: str, way: str, kind: str, *, status: str = "measured", **figures: float | str) -> None:
        extra = {"case": case, "way": way, "kind": kind, "status": status, **figures}
        named = {"name": case, "group": self._group, "fullname": self._test}
        self._told.append({**named, "stats": {}, "extra_info": extra})

    def measuring(self, measure: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `measure` once and returns the result. `measure` itself times several ways in turn."""
        found: T = self._benchmark.pedantic(measure, args, kwargs, rounds=1, iterations=1)
        return found


@pytest.fixture
def tell(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> Tell:
    return Tell(request, benchmark)


@pytest.fixture
def time(request: pytest.FixtureRequest) -> Time:
    return request.config.stash[TIME]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--within", type=float, metavar="SECONDS", help="start no test or case after this time")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TIME] = Time(config.getoption("within", None))


@pytest.fixture(autouse=True)
def _begins_in_time(time: Time) -> None:
    if not list(time.while_it_lasts([None])):
        pytest.skip("the time is over")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Exits with UNFINISHED if the run passed, but left cases out because the time was over."""
    if session.exitstatus == pytest.ExitCode.OK and session.config.stash[TIME].over:
        session.exitstatus = UNFINISHED


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: dict[str, Any]) -> None:
    """Replaces pytest-benchmark's entries of tests which called `tell`, as they have only the tests' durations."""
    told = config.stash.get(TOLD, [])
    tests = {each["fullname"] for each in told}
    output_json["benchmarks"] = [each for each in output_json["benchmarks"] if each["fullname"] not in tests] + told


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Adds the device, the machine, the versions, and the measured ceilings of a GPU."""
    gpu = torch.cuda.is_available()
    machine_info["device"] = torch.cuda.get_device_name() if gpu else "cpu"
    machine_info["machine"] = MACHINE
    machine_info["versions"] = {"torch": torch.__version__, "triton": _triton()}
    machine_info["ceilings"] = _ceilings(config) if gpu else {}


def pytest_benchmark_group_stats(config: pytest.Config, benchmarks: Any, group_by: str) -> list[Any]:
    """Prints no table of the tests' durations. `pytest_terminal_summary` prints the results."""
    return []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    cases = [history.case_of(each) for each in config.stash.get(TOLD, [])]
    if any(case.kind == "time" for case in cases) and torch.cuda.is_available():
        terminalreporter.write_line(summary.of_device(torch.cuda.get_device_name(), _ceilings(config)))
        cases = [history.case_of(each) for each in config.stash[TOLD]]
    for line in summary.lines(cases):
        terminalreporter.write_line(line)


def _ceilings(config: pytest.Config) -> Mapping[str, float]:
    """The GPU's ceilings, measured once a run.

    A failed measurement is recorded as a failed case, and the result is empty.
    """
    if CEILINGS not in config.stash:
        failed = Failures()
        config.stash[CEILINGS] = {}
        with failed.of(COPY_AND_MATMUL):
            config.stash[CEILINGS] = timing.ceilings()
        for way, error in failed.items():
            extra = {"case": "what the device can do", "way": way, "kind": "time", "status": "failed", "error": error}
            named = {"name": extra["case"], "group": "device", "fullname": extra["case"]}
            config.stash.setdefault(TOLD, []).append({**named, "stats": {}, "extra_info": extra})
    return config.stash[CEILINGS]


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "absent"
    return str(triton.__version__)
