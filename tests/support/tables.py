"""How many combinations the tables of every mesh and plan ran, told at the end of a run: a test of such a table has many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import PurePath

import pytest

PROPERTY = "combinations"


@pytest.fixture
def combinations(record_property: Callable[[str, object], None]) -> Callable[[int], None]:
    """`combinations(12)` in a test says that it ran so many."""
    return lambda count: record_property(PROPERTY, count)


def lines(reports: Iterable[pytest.TestReport]) -> list[str]:
    """A line for each file whose tests said how many they ran."""
    counts: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for report in reports:
        for name, value in report.user_properties if report.when == "call" else ():
            if name == PROPERTY:
                file = PurePath(report.nodeid.partition("::")[0]).name
                counts[file] += int(str(value))
                failed[file] += report.failed
    width = max(map(len, counts), default=0)
    return [
        f"{file:{width}}  {count:>6,} combinations" + (f", in {failed[file]} failed tests too" if failed[file] else "")
        for file, count in sorted(counts.items())
    ]
