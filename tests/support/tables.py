"""The summary at the end of a run of the tables of every mesh and plan.

It has the number of combinations that ran, and the largest errors of losses and gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import PurePath

import pytest

PROPERTY = "combinations"
OFF = ("loss", "gradient")  # quantities whose errors are reported


@pytest.fixture
def combinations(record_property: Callable[[str, object], None]) -> Callable[[int], None]:
    """`combinations(12)` in a test reports 12 combinations."""
    return lambda count: record_property(PROPERTY, count)


@pytest.fixture
def greatest(record_property: Callable[[str, object], None]) -> Callable[[float, float], None]:
    """`greatest(1e-7, 2e-6)` in a test reports the largest relative errors of a loss and of a gradient."""

    def say(loss: float, gradient: float) -> None:
        for name, value in zip(OFF, (loss, gradient), strict=True):
            record_property(name, value)

    return say


def lines(reports: Iterable[pytest.TestReport]) -> list[str]:
    """A line for each file whose tests reported combinations."""
    counts: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    off: dict[str, dict[str, float]] = {}
    for report in reports:
        file = PurePath(report.nodeid.partition("::")[0]).name
        for name, value in report.user_properties if report.when == "call" else ():
            if name == PROPERTY:
                counts[file] += int(str(value))
                failed[file] += report.failed
            elif name in OFF:
                most = off.setdefault(file, dict.fromkeys(OFF, 0.0))
                most[name] = max(most[name], float(str(value)))
    width = max(map(len, counts), default=0)
    return [
        f"{file:{width}}  {count:>6,} combinations"
        + "".join(f"; a {name} off by {most:.1e} at most" for name, most in off.get(file, {}).items())
        + (f", in {failed[file]} failed tests too" if failed[file] else "")
        for file, count in sorted(counts.items())
    ]
