import gc
import importlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support.fixtures import pool
from tests.support.sample import PORTIONS, Portion, mark_all_but_a_sample

__all__ = ["pool"]

# Times are those of a shared machine.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where kernels are tested, they are imported before another test's module imports Triton: see the file that does it."""
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
    for item in items:
        item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if _starts_processes(item)}
        items.sort(key=lambda item: item.path not in slow)


def _starts_processes(item: pytest.Item) -> bool:
    return "pool" in getattr(item, "fixturenames", ()) or "end_to_end" in item.path.parts


def pytest_collection_finish() -> None:
    """What is alive now stays alive: the collector need not go through torch and the tests again and again."""
    gc.freeze()
