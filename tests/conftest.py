from collections.abc import Iterator

import hypothesis
import pytest

from tests.support.pool import Pool

hypothesis.settings.register_profile("no deadline", deadline=None)  # times are those of a shared machine
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Gloo worker processes: `pool.run(function, *arguments, ranks=4)` returns the results by rank."""
    with Pool() as pool:
        yield pool
