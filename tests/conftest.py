"""Options, marks and fixtures of all tests."""

import gc
import importlib
import importlib.util
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.collected import FOUND
from tests.support.fixtures import pool
from tests.support.parts import is_in, read_part
from tests.support.sample import PORTIONS, Portion, mark_all_but_a_sample
from tests.support.tables import combinations, greatest, lines

__all__ = ["combinations", "greatest", "pool"]

if importlib.util.find_spec("hypothesis"):  # not installed for the tests that need a GPU
    import hypothesis

    # No limits on time, because other programs share the machine.
    patient = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=patient)
    hypothesis.settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --part, for suites that take too long to run whole each time."""
    text = "run part K of N of the tests, chosen by their names; commit/N chooses K by the time of the last commit"
    parser.addoption("--part", metavar="K/N", help=text)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import the kernel tests' conftest before any test module imports Triton; see there for the reason.

    Garbage collection is off until all tests are collected; see `pytest_collection_finish`.
    pytest-xdist's controller neither imports nor collects tests.
    """
    if session.config.getoption("dist", "no") != "no" and not hasattr(session.config, "workerinput"):
        return
    gc.disable()
    kernels = Path(__file__).parent / "kernels"
    asked = [Path(argument.partition("::")[0]).resolve() for argument in session.config.args]
    if any(kernels.is_relative_to(path) or path.is_relative_to(kernels) for path in asked):
        importlib.import_module("tests.kernels.conftest")


@pytest.fixture(params=PORTIONS)
def portion(request: pytest.FixtureRequest) -> Portion:
    """A sample of many cases, or the remaining cases: `for case in portion.of(cases, every=10)`."""
    chosen: Portion = request.param
    return chosen


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Mark the items of a test function that `./run test` leaves out; see `tests.support.sample`."""
    made = yield
    if isinstance(made, list):
        mark_all_but_a_sample(made)
    return made


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the part of the tests, and group and order them for pytest-xdist.

    A worker takes a file at a time, except for tests with a group of their own. Files whose tests start processes come
    first: they take longest, and short files at the end let the workers finish together.
    """
    if [Path(path).resolve() for path in config.args] == [Path(__file__).parent]:
        config.stash[FOUND] = [(item.nodeid, item) for item in items]
    if (asked := config.getoption("part")) is not None:
        try:
            part, parts = read_part(asked, Path(__file__).parent)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        chosen = [item for item in items if is_in(item.nodeid, part, parts)]
        config.hook.pytest_deselected(items=[item for item in items if not is_in(item.nodeid, part, parts)])
        items[:] = chosen
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if _starts_processes(item)}
        items.sort(key=lambda item: item.path not in slow)


def _starts_processes(item: pytest.Item) -> bool:
    return "pool" in getattr(item, "fixturenames", ()) or "end_to_end" in item.path.parts


def pytest_collection_finish() -> None:
    """Freeze all live objects, to spare the garbage collector repeated visits of torch and the tests."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after the fixtures of the module have ended
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freeze what a file leaves, such as modules imported by its tests: a collection would take a fifth of a second."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many combinations the tables ran, and their largest errors."""
    reports = [each for outcome in ("passed", "failed") for each in terminalreporter.getreports(outcome)]
    if ran := lines(reports):
        terminalreporter.section("tables of every mesh and plan")
        for line in ran:
            terminalreporter.write_line(line)
