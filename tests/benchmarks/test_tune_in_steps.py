"""The tuning of products that travel in steps, on processes of a CPU: small sizes, the host's clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from weft.kernels.launching.launched import write_table
from weft.kernels.matmul.sharded.choice import MEASURED, TABLE, OverlappedOp, ShardedProduct, Timing

from benchmarks import tune_in_steps
from benchmarks.timing import Host
from tests.support.pool import Pool

SMALL: list[tuple[OverlappedOp, int, int]] = [("all_gather_matmul", 12, 8), ("matmul_reduce_scatter", 12, 8)]


def found(form: OverlappedOp) -> Timing:
    return tune_in_steps.timed(form, 6, 12, 8, "cpu", torch.float32, Host(), "here", rounds=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_both_ways_are_compared_and_timed(pool: Pool, form: OverlappedOp, tmp_path: Path) -> None:
    first, second = pool.run(found, form, ranks=2)
    assert first == second and min(first.seconds, first.pair_seconds) > 0
    assert first.of == ShardedProduct(form, "cpu", "float32", 2, 8, 16, 8)
    write_table({first.of: first}, tmp_path / "table.json")
    assert Timing.read(tmp_path / "table.json") == {first.of: first}


def measured(table: Path) -> list[str]:
    """The products that were timed."""
    timed, names = tune_in_steps.timed, []

    def noted(form: OverlappedOp, *rest: Any) -> Timing:
        names.append(form)
        return timed(form, *rest, rounds=2)

    tune_in_steps.timed = noted  # type: ignore[assignment]
    try:
        tune_in_steps.measure(table, "cpu", torch.float32, Host(), "here", [6], SMALL)
    finally:
        tune_in_steps.timed = timed
    return names


@pytest.mark.exhaustive
def test_calls_in_the_table_are_not_measured_again(pool: Pool, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text("[]")
    first, again = ({*map(tuple, pool.run(measured, table, ranks=2))} for _ in range(2))
    assert first == {("all_gather_matmul", "matmul_reduce_scatter")} and again == {()}
    assert len(Timing.read(table)) == 2


def test_the_table_is_as_it_is_written(tmp_path: Path) -> None:
    write_table(MEASURED, tmp_path / "table.json")
    assert (tmp_path / "table.json").read_text() == TABLE.read_text()


def test_tuning_needs_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(RuntimeError, match="there is no GPU to measure on"):
        tune_in_steps.tune(tmp_path / "table.json")
