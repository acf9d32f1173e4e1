"""The benchmark of products and its tuning, on a CPU: small sizes, the host's clock, the kernels interpreted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import products, tune_matmul
from benchmarks.products import TORCH, compared
from benchmarks.timing import Host


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled: what is shown is that each way is right and in its place."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.mark.parametrize("kind", ["swiglu"])
def test_each_way_is_checked_and_timed(eager: None, kind: str) -> None:
    found = compared(kind, 32, 48, 16, "cpu", Host(), rounds=3)
    assert {"Weft", TORCH} <= {*found.timed} and not found.failed
    assert found.flop == 2 * 2 * 32 * 48 * 16
    assert f"{kind}, 32 x 48 x 16 bf16" in str(found)


def test_a_way_that_is_wrong_is_not_timed(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = products.Factors.of(32, 48, 16, "cpu")
    ways = {"Weft": lambda: given.x @ given.weight.mT, TORCH: lambda: given.x @ given.up.mT}
    monkeypatch.setitem(products.KINDS, "plain", lambda given: ways)
    found = compared("plain", 32, 48, 16, "cpu", Host(), rounds=3)
    assert {*found.timed} == {"Weft"}
    assert "torch errs by" in found.failed[TORCH]


def test_tuning_needs_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(RuntimeError, match="there is no GPU to measure on"):
        tune_matmul.tune(tmp_path / "table.json")


def test_candidates_fit_an_h100() -> None:
    """In shared memory, with 1 KiB for barriers and descriptors."""
    for each in tune_matmul.CANDIDATES:
        held = each.stages * (each.tile_m + each.tile_n) * each.tile_k * 2
        assert held <= 226 * 1024, each
        assert replace(each) == each
