"""The summary of the tables of every mesh and plan counts combinations by file."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tables import OFF, PROPERTY, lines


def report(nodeid: str, outcome: Any = "passed", when: Any = "call", **properties: float) -> pytest.TestReport:
    own = list(properties.items())
    return pytest.TestReport(nodeid, ("", 0, ""), {}, outcome, None, when, user_properties=own)


def test_combinations_are_added_up_by_file() -> None:
    reports = [
        report("tests/test_a.py::test[1]", **{PROPERTY: 1200}),
        report("tests/test_a.py::test[1]", when="teardown", **{PROPERTY: 1200}),
        report("tests/test_a.py::test[2]", "failed", **{PROPERTY: 34}),
        report("tests/test_longer.py::test", **{PROPERTY: 5}),
        report("tests/test_b.py::test", other=7),
    ]
    assert lines(reports) == [
        "test_a.py        1,234 combinations, in 1 failed tests too",
        "test_longer.py       5 combinations",
    ]
    assert lines([]) == []


def test_the_greatest_deviations_are_told_beside_them() -> None:
    reports = [
        report("tests/test_a.py::test[1]", **{PROPERTY: 2}, **dict(zip(OFF, (1e-7, 3e-6), strict=True))),
        report("tests/test_a.py::test[2]", **{PROPERTY: 1}, **dict(zip(OFF, (2.5e-7, 0.0), strict=True))),
        report("tests/test_b.py::test", **{PROPERTY: 5}),
    ]
    assert lines(reports) == [
        "test_a.py       3 combinations; a loss off by 2.5e-07 at most; a gradient off by 3.0e-06 at most",
        "test_b.py       5 combinations",
    ]
