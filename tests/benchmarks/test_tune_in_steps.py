"""The tuning of products that travel in steps, on processes of a CPU: small sizes, the host's clock."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from weft.kernels.matmul.configurations import write
from weft.kernels.matmul.sharded.choice import MEASURED, TABLE, Form, Product, Timed, read

from benchmarks import tune_in_steps
from benchmarks.timing import Host
from tests.support.pool import Pool


def found(form: Form) -> Timed:
    return tune_in_steps.timed(form, 6, 12, 8, "cpu", torch.float32, Host(), "here", rounds=2)


@pytest.mark.parametrize("form", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_both_ways_are_compared_and_timed(pool: Pool, form: Form, tmp_path: Path) -> None:
    first, second = pool.run(found, form, ranks=2)
    assert first == second and min(first.seconds, first.pair_seconds) > 0
    assert first.of == Product(form, "cpu", "float32", 2, 8, 16, 8)
    write({first.of: first}, tmp_path / "table.json")
    assert read(tmp_path / "table.json") == {first.of: first}


def test_the_table_is_as_it_is_written(tmp_path: Path) -> None:
    write(MEASURED, tmp_path / "table.json")
    assert (tmp_path / "table.json").read_text() == TABLE.read_text()


def test_tuning_needs_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(RuntimeError, match="there is no GPU to measure on"):
        tune_in_steps.tune(tmp_path / "table.json")
