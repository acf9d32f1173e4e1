"""The benchmark beside torch's whole stack compares what computes the same, on small meshes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import test_parallel_stacks as stacks


@pytest.mark.exhaustive  # what the benchmark checks wherever it runs
@pytest.mark.parametrize(
    ("axes", "zero"),
    [
        pytest.param({"dp": 2}, 3, id="dp2"),
        pytest.param({"pp": 2, "dp": 1}, 1, id="pp2"),
        pytest.param({"dp": 2, "tp": 2}, 3, id="dp2-tp2"),
    ],
)
def test_both_stacks_take_the_same_steps(axes: dict[str, int], zero: int, pool: Any) -> None:
    ranks = pool.run(stacks.measure, axes, zero, 1, ranks=2 if len(axes) == 1 or "pp" in axes else 4)
    stacks.check(ranks)
    for rank in ranks:
        assert len(rank["Weft"].seconds) == 1
        assert rank["Weft"].held == rank["torch"].held
        loss = 4 * (len(axes) - 1)  # an all-reduce of one number more or less
        assert abs(rank["Weft"].received - rank["torch"].received) <= 8 + loss


def test_losses_apart_are_no_comparison() -> None:
    way = stacks.Measured((2.0, 1.0), (0.1,), (0.1,), 1, 0, 0)
    apart = replace(way, losses=(2.0, 1.001))
    with pytest.raises(AssertionError):
        stacks.check([{"torch": way, "Weft": apart}])
