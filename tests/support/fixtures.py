"""Fixtures shared by tests and benchmarks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pool import Pool

# Where the workers keep answers of DTensor's sharding propagation from run to run.
ANSWERS = Path(__file__).parents[2] / ".pytest_cache" / "propagation"


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Gloo worker processes: `pool.run(function, *arguments, ranks=4)` returns the results by rank."""
    with Pool(ANSWERS) as pool:
        yield pool
