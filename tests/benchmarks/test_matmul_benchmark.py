"""The benchmark of products and its tuning, on a CPU; tests/kernels/matmul/test_tuning.py has what takes kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from weft.kernels.matmul.configurations import ProductClass

from benchmarks import products, tune_matmul
from benchmarks.products import FORMATS, TORCH, compared
from benchmarks.timing import Host


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled: what is shown is that each way is right and in its place."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def test_a_way_that_is_wrong_is_not_timed(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = products.Factors.of(32, 48, 16, "cpu")
    ways = {"Weft": lambda: given.a @ given.b, TORCH: lambda: given.a @ given.up}
    monkeypatch.setitem(products.KINDS, "plain", replace(products.KINDS["plain"], ways=lambda given: ways))
    found = compared("plain", 32, 48, 16, "cpu", Host(), rounds=3)
    assert {*found.timed} == {"Weft"}
    assert "torch errs by" in found.failed[TORCH]


def test_tuning_needs_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(RuntimeError, match="there is no GPU to measure on"):
        tune_matmul.tune(tmp_path / "table.json")


@pytest.mark.parametrize("name", FORMATS)
def test_candidates_fit_an_h100(name: str) -> None:
    """In shared memory, with 1 KiB for barriers and descriptors."""
    format = FORMATS[name]
    for each in tune_matmul.candidates(ProductClass.of("sm_90", name, "plain", "b", 64, 64, 64), format):
        held = each.stages * (each.tile_m + each.tile_n) * each.tile_k * format.dtype.itemsize
        assert held <= 226 * 1024, each


def test_every_kind_and_pass_is_tuned_of_every_format() -> None:
    """As little as there is of each: one layer, one expert's matrix."""
    found = {
        name: {make().of[2:4] for make in tune_matmul.cases(format, "cpu", [64], [(32, 16)], [(4, 32, 16)])}
        for name, format in FORMATS.items()
    }
    groups = {("grouped", ""), ("grouped", "b")}
    wide = {("plain", "b"), ("plain", ""), ("plain", "a"), ("fused", ""), ("gated", "b"), ("grouped_weights", "a")}
    assert found.pop("fp8") == {("fused", "b"), ("one_scale", "b")} | groups
    assert found == dict.fromkeys(found, {("fused", "b")} | groups | wide)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000])
def test_rows_of_every_tile_are_checked(rows: int) -> None:
    found = products.sampled(rows).tolist()
    assert {row // 64 for row in found} == set(range(-(-rows // 64)))
    assert found == sorted(set(found)) and found[-1] == rows - 1
