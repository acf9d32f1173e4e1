import gc

import hypothesis
import pytest

from tests.support.fixtures import pool

__all__ = ["pool"]

hypothesis.settings.register_profile("no deadline", deadline=None)  # times are those of a shared machine
hypothesis.settings.load_profile("no deadline")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With pytest-xdist, tests that start processes run on one worker, since together they would crowd the cores; the others
    a file at a time, but for tests of it that name a group of their own.
    """
    for item in items:
        starts = "pool" in getattr(item, "fixturenames", ()) or "end_to_end" in item.path.parts
        item.add_marker(pytest.mark.xdist_group("processes" if starts else item.path.name))


def pytest_collection_finish() -> None:
    """What is alive now stays alive: the collector need not go through torch and the tests again and again."""
    gc.freeze()
