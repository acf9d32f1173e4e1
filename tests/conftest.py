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

if importlib.util.find_spec("hypothesis"):  # the tests that need a GPU do without it
    import hypothesis

    # Times are those of a shared machine.
    patient = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=patient)
    hypothesis.settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    """For what takes too long to be run whole each time."""
    told = (
        "run part K of N of the tests, as their names say; of commit/N that which the time of the last commit chooses"
    )
    parser.addoption("--part", metavar="K/N", help=told)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where kernels are tested, they are imported before another test's module imports Triton: see the file that does it.

    Until all is collected, nothing is garbage: see `pytest_collection_finish`.
    """
    gc.disable()
    kernels = Path(__file__).parent / "kernels"
    asked = [Path(argument.partition("::")[0]).resolve() for argument in session.config.args]
    if any(kernels.is_relative_to(path) or path.is_relative_to(kernels) for path in asked):
        importlib.import_module("tests.kernels.conftest")


@pytest.fixture(params=PORTIONS)
def portion(request: pytest.FixtureRequest) -> Portion:
    """Takes a sample of many cases, or the rest of them: `for case in portion.of(cases, every=10)`."""
    chosen: Portion = request.param
    return chosen


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Of the items that a test function becomes, `./run test` takes a sample: see `tests.support.sample`."""
    made = yield
    if isinstance(made, list):
        mark_all_but_a_sample(made)
    return made


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With pytest-xdist a worker takes a file at a time, but for tests of it that name a group of their own. Files whose tests
    start processes come first: they take the longest, and the short ones at the end let the workers finish together.
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
    """What is alive now stays alive: the collector need not go through torch and the tests again and again."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how many combinations the tables ran, and how far they were off."""
    reports = [each for outcome in ("passed", "failed") for each in terminalreporter.getreports(outcome)]
    if ran := lines(reports):
        terminalreporter.section("tables of every mesh and plan")
        for line in ran:
            terminalreporter.write_line(line)
