"""Fixtures that the tests and the benchmarks share."""

from collections.abc import Iterator

import pytest

from tests.support.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Gloo worker processes: `pool.run(function, *arguments, ranks=4)` returns the results by rank."""
    with Pool() as pool:
        yield pool
