"""The benchmark of products and the command that fills their table, at small sizes: the host's clock, the kernels interpreted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.kernels import grouped_matmul
from weft.kernels.matmul import configurations
from weft.kernels.matmul.configurations import Class, read

from benchmarks import tune_matmul
from benchmarks.products import FORMATS, KERNEL, TORCH, Inaccurate, compared
from benchmarks.timing import Host

from .cases import normal
from .test_grouped import ends
from .test_table import Spied
from .test_tiles import SMALL

TRIED = [SMALL, replace(SMALL, tile_m=32)]
pytestmark = pytest.mark.usefixtures("interpreted", "small")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, and two configurations are tried: what is shown is that each way is right and in its place."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(tune_matmul, "candidates", lambda of, format: TRIED)


@pytest.mark.parametrize("kind", ["swiglu"])
def test_each_way_is_checked_and_timed(kind: str) -> None:
    found = compared(kind, 32, 48, 16, "cpu", Host(), rounds=3)
    assert {"Weft", TORCH, KERNEL} <= {*found.timed} and not found.failed
    assert found.flop == 2 * 2 * 32 * 48 * 16
    assert f"{kind}, 32 x 48 x 16 bf16" in str(found)


@pytest.mark.parametrize("name", FORMATS)
def test_each_case_is_right_and_its_row_is_kept(name: str, tmp_path: Path) -> None:
    table, format = tmp_path / "table.json", FORMATS[name]
    table.write_text("[]")
    makers = list(tune_matmul.cases(format, "cpu", [32], [(48, 16)], [(2, 32, 16)]))
    tune_matmul.measure(makers, format, table, Host(), "a test", rounds=2)
    found = read(table)
    assert len(found) == len(makers) == (3 if name == "fp8" else 9)
    assert all(row.configuration in TRIED and row.seconds > 0 for row in found.values())
    assert {of.dtype for of in found} == {str(format.dtype).removeprefix("torch.")}  # no tf32 on a CPU


def test_a_kernel_that_is_wrong_is_no_candidate() -> None:
    format = FORMATS["bf16"]
    case = tune_matmul.of_product("plain", "b", (32, 48, 16), format, "cpu")
    wrong = replace(case, truth=case.truth + 1)
    with pytest.raises(Inaccurate, match=r"Configuration.* errs by"):
        tune_matmul.fastest(wrong, TRIED, Host(), "a test", rounds=2)


def test_what_was_tuned_of_groups_is_what_their_product_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.kernels.grouped_matmul import kernel

    table, format = tmp_path / "table.json", FORMATS["bf16"]
    table.write_text("[]")
    monkeypatch.setattr(tune_matmul, "candidates", lambda of, format: [TRIED[1]])
    tune_matmul.measure(
        [lambda: tune_matmul.of_groups("", 2, (32, 32, 16), format, "cpu")], format, table, Host(), "a test", rounds=2
    )
    ((of, row),) = read(table).items()
    assert of == Class.of("interpreted", "bfloat16", "grouped", "", 16, 32, 16, 2)
    monkeypatch.setitem(configurations.MEASURED, of, row)
    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(kernel, "rows_by_group", Spied(kernel.rows_by_group, launches))
    a, b = normal(32, 16, dtype=torch.bfloat16), normal(2, 16, 32, dtype=torch.bfloat16)
    grouped_matmul(a, b, ends([5, 27]))
    assert launches[0]["TILE_N"] == TRIED[1].tile_m
