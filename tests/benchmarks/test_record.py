"""What a case says of itself."""

from __future__ import annotations

from tests.benchmarks.cases import counted


def test_the_points_of_a_curve_are_told_from_the_other_numbers() -> None:
    case = counted(step_002=2.0, step_001=3.5, loss=1.0, timer="host", right=True, flop_64=2)
    assert case.curves == {"step": {1: 3.5, 2: 2.0}}
    assert case.numbers == {"loss": 1.0, "flop_64": 2}
