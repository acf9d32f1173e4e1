"""The table of measurements: the class of a product, the row that a product finds, and the configuration launched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from weft.kernels import grouped_matmul, linear
from weft.kernels.launching.launched import write_table
from weft.kernels.matmul import configurations, function
from weft.kernels.matmul.configurations import (
    MIDDLE,
    Configuration,
    ProductClass,
    ProductKind,
    ProductMeasurement,
    find_measured,
    is_kernel_faster,
)

from .cases import assert_as_good_as_eager, normal
from .test_grouped import eager, ends
from .test_tiles import SMALL

OF = ProductClass.of("sm_90", "bfloat16", "plain", "b", 8192, 4096, 4000)
ROW = ProductMeasurement(of=OF, configuration=MIDDLE, seconds=1.0, torch_seconds=2.0, where="a test")
SLOWER = replace(ROW, of=OF._replace(m=1024), torch_seconds=0.5)


def test_a_class_has_sizes_up_to_powers_of_two() -> None:
    assert ProductClass("sm_90", "bfloat16", "plain", "b", 8192, 4096, 4096, 1) == OF
    assert ProductClass.of("sm_90", "bfloat16", "grouped", "", 1000, 1, 0, 6)[-4:] == (1024, 1, 1, 8)


def test_the_faster_of_two_is_taken(tmp_path: Path) -> None:
    write_table({each.of: each for each in (ROW, SLOWER)}, tmp_path / "table.json")
    table = ProductMeasurement.read(tmp_path / "table.json")
    assert table == {ROW.of: ROW, SLOWER.of: SLOWER}
    assert is_kernel_faster(OF, table) and not is_kernel_faster(SLOWER.of, table)
    assert find_measured(OF, table) == find_measured(SLOWER.of, table) == MIDDLE
    fused = SLOWER.of._replace(kind="fused")
    assert not is_kernel_faster(fused, {fused: replace(SLOWER, of=fused)})


@pytest.mark.parametrize(
    "other", [{"k": 512}, {"transposed": ""}, {"transposed": "a"}, {"dtype": "float16"}, {"groups": 8}], ids=str
)
def test_a_row_is_of_its_class_alone(other: dict[str, Any]) -> None:
    assert find_measured(OF._replace(**other), {OF: ROW}) is None
    assert not is_kernel_faster(OF._replace(**other), {OF: ROW})


def test_a_row_is_read_by_people(tmp_path: Path) -> None:
    write_table({OF: ROW}, tmp_path / "table.json")
    (row,) = json.loads((tmp_path / "table.json").read_text())
    assert row["of"] == {
        "chip": "sm_90", "dtype": "bfloat16", "kind": "plain",
        "transposed": "b", "m": 8192, "n": 4096, "k": 4096, "groups": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "runs"), [("plain", False), ("fused", True), ("gated", False)])
def test_an_unmeasured_product_runs_the_kernel_where_a_pass_is_saved(kind: ProductKind, runs: bool) -> None:
    assert is_kernel_faster(OF._replace(kind=kind), {}) == runs


def test_the_table_is_one_measurement_a_line() -> None:
    rows: list[Any] = json.loads(configurations.TABLE.read_text())
    assert [row["of"] for row in rows] == sorted((row["of"] for row in rows), key=lambda of: list(of.values()))
    assert all(row["where"] for row in rows)


def test_the_three_products_of_a_layer_are_of_three_classes(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are 16 x 16 x 16: forward, dX and dW differ in their transposed operands alone."""
    from weft.kernels.matmul.launch import class_of

    asked = []

    def uses_kernel(a: Tensor, b: Tensor, kind: ProductKind) -> bool:
        asked.append(class_of(a, b, kind))
        return False

    monkeypatch.setattr(function, "uses_kernel", uses_kernel)
    monkeypatch.setitem(configurations.MEASURED, OF, ROW)
    x, weight = (normal(16, 16, dtype=torch.float32, seed=seed).requires_grad_() for seed in (0, 1))
    linear(x, weight).backward(torch.ones(16, 16))
    assert asked == [ProductClass("interpreted", "float32", "plain", each, 16, 16, 16) for each in ("b", "", "a")]


class Spied:
    """A kernel that records the arguments of its launches."""

    def __init__(self, kernel: Any, launches: list[dict[str, Any]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **named: Any) -> None:
            self.launches.append(named)
            self.kernel[grid](*arguments, **named)

        return launch


def measured(monkeypatch: pytest.MonkeyPatch, of: ProductClass, configuration: Configuration) -> None:
    row = ProductMeasurement(of=of, configuration=configuration, seconds=1.0, torch_seconds=0.5, where="a test")
    monkeypatch.setitem(configurations.MEASURED, of, row)


def test_products_of_groups_find_rows_of_their_own(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped forward, rows' gradient and matrices' gradient find rows of their own, not those of plain products."""
    from weft.kernels.grouped_matmul import kernel

    sizes, K, M = [20, 0, 28, 16], 16, 32  # 16 rows a group
    forward, rows, weights = (replace(SMALL, tile_m=size) for size in (32, 64, 128))
    measured(monkeypatch, ProductClass.of("interpreted", "float32", "grouped", "", 16, M, K, 4), forward)
    measured(monkeypatch, ProductClass.of("interpreted", "float32", "grouped", "b", 16, K, M, 4), rows)
    measured(monkeypatch, ProductClass.of("interpreted", "float32", "grouped_weights", "a", K, M, 16, 4), weights)
    measured(monkeypatch, ProductClass.of("interpreted", "float32", "fused", "", 16, M, K), replace(SMALL, tile_m=256))
    launches: list[dict[str, Any]] = []
    for name in ("rows_by_group", "weights_by_group"):
        monkeypatch.setattr(kernel, name, Spied(getattr(kernel, name), launches))
    a, b = normal(64, K, dtype=torch.float32).requires_grad_(), normal(4, K, M, dtype=torch.float32).requires_grad_()
    found = grouped_matmul(a, b, ends(sizes))
    found.backward(torch.ones(64, M))
    assert [launch.get("TILE_N") for launch in launches[:2]] == [32, 64]
    assert launches[2]["TILE_K"] == 128
    with torch.no_grad():
        assert_as_good_as_eager(found, eager(a, b, sizes), eager(a.double(), b.double(), sizes))


def test_groups_that_were_not_measured_are_cut_by_the_rule(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.kernels.grouped_matmul import kernel

    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(kernel, "rows_by_group", Spied(kernel.rows_by_group, launches))
    measured(
        monkeypatch, ProductClass.of("interpreted", "float32", "grouped", "", 16, 32, 16, 2), replace(SMALL, tile_m=32)
    )
    a, b = normal(64, 16, dtype=torch.float32), normal(4, 16, 32, dtype=torch.float32)
    grouped_matmul(a, b, ends([16] * 4))  # of four groups
    assert launches[0]["TILE_N"] == configurations.INTERPRETED.tile_m


@pytest.mark.parametrize(
    ("dtypes", "tf32", "name"),
    [
        ((torch.float32, torch.float32), False, "float32"),
        ((torch.float32, torch.float32), True, "tf32"),
        ((torch.bfloat16, torch.bfloat16), True, "bfloat16"),
        ((torch.float8_e4m3fn, torch.float8_e4m3fn), False, "float8_e4m3fn"),
        ((torch.float8_e5m2, torch.float8_e4m3fn), False, "float8_e5m2-float8_e4m3fn"),
    ],
    ids=str,
)
def test_a_class_names_how_factors_are_multiplied(
    dtypes: tuple[torch.dtype, torch.dtype], tf32: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.kernels.matmul.launch import dtype_of

    if tf32:
        monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    with FakeTensorMode():
        a, b = (torch.empty(4, 4, dtype=dtype, device="cuda") for dtype in dtypes)
        assert dtype_of(a, b) == name
