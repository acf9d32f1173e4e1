"""Benchmarks run on the tests' worker processes; what they find goes into pytest-benchmark's JSON, and into a table at the end."""

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
MACHINE = machine.told()  # as the run begins, before it is a load itself
TOLD = pytest.StashKey[list[dict[str, Any]]]()
COPY_AND_MATMUL = "torch: a copy, and a matmul"
CEILINGS = pytest.StashKey[Mapping[str, float]]()
TIME = pytest.StashKey["Time"]()


class Time:
    """What there is of it: without an end, or up to one. over: whether something was left out for want of it."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else clock.monotonic() + seconds
        self.over = False

    def while_it_lasts(self, cases: Iterable[T]) -> Iterator[T]:
        """The first of them: none is begun after the end."""
        for case in cases:
            if self._end is not None and clock.monotonic() >= self._end:
                self.over = True
                return
            yield case


class Tell:
    """tell(case, way, kind, **figures): one way to compute one thing, figures in SI units; see `benchmarks.history`.

    kind: "count" of what no clock measured, "host_time" of a CPU, "time" of kernels on a GPU.
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
        """What `measure` returns: it takes its own times, of several ways in turn, so it is run once."""
        found: T = self._benchmark.pedantic(measure, args, kwargs, rounds=1, iterations=1)
        return found


@pytest.fixture
def tell(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> Tell:
    return Tell(request, benchmark)


@pytest.fixture
def time(request: pytest.FixtureRequest) -> Time:
    return request.config.stash[TIME]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--within", type=float, metavar="SECONDS", help="leave out what would begin later")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TIME] = Time(config.getoption("within", None))


@pytest.fixture(autouse=True)
def _begins_in_time(time: Time) -> None:
    if not list(time.while_it_lasts([None])):
        pytest.skip("the time is over")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that left something out for want of time, and is right otherwise, says so."""
    if session.exitstatus == pytest.ExitCode.OK and session.config.stash[TIME].over:
        session.exitstatus = UNFINISHED


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: dict[str, Any]) -> None:
    """What was told stands for the tests that told it: pytest-benchmark has seen how long they took."""
    told = config.stash.get(TOLD, [])
    tests = {each["fullname"] for each in told}
    output_json["benchmarks"] = [each for each in output_json["benchmarks"] if each["fullname"] not in tests] + told


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Of which device the run is, on what machine, with which versions, and what the device can do."""
    gpu = torch.cuda.is_available()
    machine_info["device"] = torch.cuda.get_device_name() if gpu else "cpu"
    machine_info["machine"] = MACHINE
    machine_info["versions"] = {"torch": torch.__version__, "triton": _triton()}
    machine_info["ceilings"] = _ceilings(config) if gpu else {}


def pytest_benchmark_group_stats(config: pytest.Config, benchmarks: Any, group_by: str) -> list[Any]:
    """No table of how long the tests took: `pytest_terminal_summary` has what they found."""
    return []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    cases = [history.case_of(each) for each in config.stash.get(TOLD, [])]
    if any(case.kind == "time" for case in cases) and torch.cuda.is_available():
        terminalreporter.write_line(summary.of_device(torch.cuda.get_device_name(), _ceilings(config)))
        cases = [history.case_of(each) for each in config.stash[TOLD]]
    for line in summary.lines(cases):
        terminalreporter.write_line(line)


def _ceilings(config: pytest.Config) -> Mapping[str, float]:
    """Measured once; where that fails, it is told as a case, and there are none."""
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
