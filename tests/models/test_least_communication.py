"""Collectives and bytes of every family under every plan are the least that is known; `benchmarks/least.py` has the formulas."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.least import FAMILIES, ROWS, Amount, Row, compared, least_of_a_block

EACH = [pytest.param(row, id=f"{row.name}-{row.where}".replace(", ", "-").replace(" ", "-")) for row in ROWS]


@pytest.mark.parametrize("row", EACH)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_communicates_the_least_that_is_known(family: str, row: Row) -> None:
    found = compared(family, row)
    assert found
    for phase, (recorded, least) in found.items():
        assert recorded == least, phase


def test_the_least_of_a_block_by_hand() -> None:
    """GPT-2 of width 64, 8 x 32 tokens of float32: an all-reduce of 65,536 bytes over 2 ranks brings a rank as many."""
    two = least_of_a_block(FAMILIES["GPT-2"], Row(name="tensor", mesh={"tp": 2}), "forward")
    assert two == Amount(Counter({"all-reduce": 2}), 2 * 65536)
    keys = least_of_a_block(
        FAMILIES["GPT-2"], Row(name="keys", mesh={"cp": 2}, plan={"context": "all_gather"}), "backward"
    )
    assert keys == Amount(Counter({"reduce-scatter": 1}), 65536)  # half of keys and values, 2 x 65,536 bytes
