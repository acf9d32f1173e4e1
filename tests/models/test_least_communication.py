"""Each family under each plan issues the least known collectives and bytes; formulas are in `benchmarks/least.py`."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.least import (
    FAMILIES,
    ROWS,
    Amount,
    Row,
    compared,
    least_of_a_block,
    least_of_gradients,
    least_of_the_ends,
)

EACH = [pytest.param(row, id=f"{row.name}-{row.where}".replace(", ", "-").replace(" ", "-")) for row in ROWS]


@pytest.mark.few(1)
@pytest.mark.parametrize("row", EACH)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_communicates_the_least_that_is_known(family: str, row: Row) -> None:
    for part, (recorded, least) in compared(family, row).items():
        assert recorded == least, part


def test_the_least_of_a_block_by_hand() -> None:
    """GPT-2 of width 64, 8 x 32 tokens of float32: an all-reduce of 65,536 bytes over 2 ranks brings a rank as many."""
    two = least_of_a_block(FAMILIES["GPT-2"], Row(name="tensor", mesh={"tp": 2}), "forward")
    assert two == Amount(Counter({"all-reduce": 2}), 2 * 65536)
    keys = least_of_a_block(
        FAMILIES["GPT-2"], Row(name="keys", mesh={"cp": 2}, plan={"context": "all_gather"}), "backward"
    )
    assert keys == Amount(Counter({"reduce-scatter": 1}), 65536)  # half of keys and values, 2 x 65,536 bytes


def test_the_least_of_the_ends_by_hand() -> None:
    """For 256 tokens: 2 ranks add up the embedding rows, 65,536 bytes, and gather 12 bytes a token."""
    row = Row(name="tensor", mesh={"tp": 2})
    forward, backward = (least_of_the_ends(FAMILIES["GPT-2"], row, phase) for phase in ("forward", "backward"))
    assert forward == Amount(Counter({"all-reduce": 1, "all-gather": 1}), 65536 + 256 * 12)
    assert backward == Amount(Counter({"all-reduce": 1}), 65536)
    data = Row(name="data", mesh={"dp": 2})
    assert least_of_the_ends(FAMILIES["GPT-2"], data, "forward") == Amount(Counter({"all-reduce": 1}), 4)


def test_the_least_of_gradients_by_hand() -> None:
    """Norms under sequence parallelism, and adapters of rank 4 over dp 2 and tp 2.

    Under tp alone only the gradients of the 3 norms, of 64 elements, are reduced: each rank's come from its shard
    of the tokens. Adapters' gradients are reduced over dp; those of A of q and B of o over tp, too.
    """
    norms = Row(name="sequence", mesh={"tp": 2}, plan={"sequence": True})
    assert least_of_gradients(FAMILIES["Llama"], norms) == Amount(Counter({"all-reduce": 1}), 3 * 64 * 4)
    adapters = Row(name="adapters", mesh={"dp": 2, "tp": 2}, adapters=4)
    shards, whole = 2 * 4 * 32, 2 * 4 * 64  # B of q [64, 4] and A of o [4, 64], cut in 2; A of q and B of o
    nbytes = shards * 4 + whole * 4 * 3 / 2
    assert least_of_gradients(FAMILIES["Llama"], adapters) == Amount(Counter({"all-reduce": 2}), nbytes)
