"""The benchmark of products, and the command that fills their table: small sizes, the host's clock, interpreted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.kernels import grouped_matmul
from weft.kernels.matmul import configurations
from weft.kernels.matmul.configurations import ProductClass, ProductMeasurement

from benchmarks import tune_matmul
from benchmarks.products import AUTOTUNED, FORMATS, KERNEL, KINDS, TORCH, Inaccurate, check, compared
from benchmarks.timing import Host

from .cases import needs_scaled_rows, normal
from .test_grouped import ends
from .test_table import Spied
from .test_tiles import SMALL

COMPILE = torch.compile
TRIED = [SMALL, replace(SMALL, tile_m=32)]
pytestmark = pytest.mark.usefixtures("interpreted", "small")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile nothing, and try two configurations: these tests show that each way is right and in its place."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(tune_matmul, "candidates", lambda of, format: TRIED)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["swiglu", pytest.param("fp8", marks=needs_scaled_rows), "fp8, one scale"])
def test_each_way_is_checked_and_timed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(kind, 32, 48, 16, "cpu", Host(), rounds=3)
    assert {"Weft", TORCH, KERNEL} <= {*found.timed} and not found.failed
    assert found.flop == (2 if kind == "swiglu" else 1) * 2 * 32 * 48 * 16
    assert f"{kind}, 32 x 48 x 16 {'bf16' if kind == 'swiglu' else 'e4m3'}" in str(found)
    assert not found.tuned
    of = tune_matmul.of_product(kind, "b", (32, 48, 16), KINDS[kind].format, "cpu").of
    monkeypatch.setitem(configurations.MEASURED, of, None)
    assert compared(kind, 32, 48, 16, "cpu", Host(), rounds=3).tuned


@pytest.mark.exhaustive
def test_torchs_autotuned_product_is_timed_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [compared("gelu", 32, 48, 16, "cpu", Host(), rounds=2, autotuned=each) for each in (False, True)]
    assert [AUTOTUNED in each.timed for each in found] == [False, True]


# fp16 is tuned as bf16 is, and fp32 on a CPU as tf32.
EACH_FORMAT = [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in ("fp16", "fp32"))) for name in FORMATS]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EACH_FORMAT)
def test_each_case_is_right_and_its_row_is_kept(name: str, tmp_path: Path) -> None:
    table, format = tmp_path / "table.json", FORMATS[name]
    table.write_text("[]")
    makers = list(tune_matmul.cases(format, "cpu", [32], [(48, 16)], [(2, 32, 16)]))
    tune_matmul.measure(makers, format, table, Host(), "a test", rounds=2)
    found = ProductMeasurement.read(table)
    assert len(found) == len(makers) == (4 if name == "fp8" else 9)
    assert all(row.configuration in TRIED and row.seconds > 0 for row in found.values())
    assert {of.dtype for of in found} == {str(format.dtype).removeprefix("torch.")}  # no tf32 on a CPU


def test_a_kernel_that_is_wrong_is_no_candidate() -> None:
    format = FORMATS["bf16"]
    case = tune_matmul.of_product("plain", "b", (32, 48, 16), format, "cpu")
    truth = case.truth()
    wrong = replace(case, truth=lambda: replace(truth, values=truth.values + 1))
    with pytest.raises(Inaccurate, match=r"Configuration.* errs by"):
        tune_matmul.fastest(wrong, TRIED, Host(), "a test", rounds=2)


def test_a_product_of_groups_finds_the_tuned_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.kernels.grouped_matmul import kernel

    table, format = tmp_path / "table.json", FORMATS["bf16"]
    table.write_text("[]")
    monkeypatch.setattr(tune_matmul, "candidates", lambda of, format: [TRIED[1]])
    tune_matmul.measure(
        [lambda: tune_matmul.of_groups("", 2, (32, 32, 16), format, "cpu")], format, table, Host(), "a test", rounds=2
    )
    ((of, row),) = ProductMeasurement.read(table).items()
    assert of == ProductClass.of("interpreted", "bfloat16", "grouped", "", 16, 32, 16, 2)
    monkeypatch.setitem(configurations.MEASURED, of, row)
    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(kernel, "rows_by_group", Spied(kernel.rows_by_group, launches))
    a, b = normal(32, 16, dtype=torch.bfloat16), normal(2, 16, 32, dtype=torch.bfloat16)
    grouped_matmul(a, b, ends([5, 27]))
    assert launches[0]["TILE_N"] == TRIED[1].tile_m


@pytest.mark.parametrize("name", ["of_product", "of_groups", "of_weights"])
def test_an_error_in_a_single_tile_is_seen(name: str) -> None:
    """The last tile, and a tile in the middle, of products with several tiles of 64 rows."""
    format = FORMATS["bf16"]
    case = {
        "of_product": lambda: tune_matmul.of_product("plain", "b", (200, 48, 16), format, "cpu"),
        "of_groups": lambda: tune_matmul.of_groups("", 3, (210, 48, 16), format, "cpu"),
        "of_weights": lambda: tune_matmul.of_weights(3, (48, 48, 70), format, "cpu"),
    }[name]()
    made = case.ways(None)[TORCH]()
    check(TORCH, made, case.truth())
    for tile in (len(made) // 128, (len(made) - 1) // 64):
        wrong = made.clone()
        wrong[64 * tile : 64 * (tile + 1), -1] += 100
        with pytest.raises(Inaccurate):
            check(TORCH, wrong, case.truth())


def test_a_kernel_that_spills_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    case = tune_matmul.of_product("plain", "b", (32, 48, 16), FORMATS["bf16"], "cpu")
    found = iter([{"spill_bytes": 8.0}, {"spill_bytes": 0.0}, {"spill_bytes": 8.0}, {"spill_bytes": 8.0}])
    monkeypatch.setattr(tune_matmul, "cost", lambda way: next(found))
    row = tune_matmul.fastest(case, TRIED, Host(), "a test", rounds=2)
    assert row is not None and row.configuration == TRIED[1]
    assert tune_matmul.fastest(case, TRIED, Host(), "a test", rounds=2) is None


@pytest.mark.exhaustive
def test_tuning_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, format = tmp_path / "table.json", FORMATS["bf16"]
    table.write_text("[]")
    makers = list(tune_matmul.cases(format, "cpu", [32], [(48, 16)], [(2, 32, 16)]))[:4]
    times = iter([0.0, 1.0, 2.0])
    monkeypatch.setattr(tune_matmul.time, "monotonic", lambda: next(times))

    def tuned(where: str = "a test", end: float | None = None, again: bool = False) -> tuple[int, int]:
        """The numbers of classes left and of classes timed."""
        timed: list[ProductClass] = []
        fastest = tune_matmul.fastest

        def noted(case: tune_matmul.Case, *rest: Any) -> Any:
            timed.append(case.of)
            return fastest(case, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(tune_matmul, "fastest", noted)
            left = tune_matmul.measure(makers, format, table, Host(), where, rounds=2, end=end, again=again)
        return left, len(timed)

    assert tuned(end=1.5) == (2, 2)
    assert tuned() == (0, 2)
    assert tuned() == (0, 0)
    assert tuned(again=True) == (0, 4)
    assert tuned(where="newer versions") == (0, 4)


@pytest.mark.exhaustive
def test_a_size_is_compiled_after_any_number_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles a function for a few sizes only, and then runs it eagerly."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: COMPILE(function, backend=backend, dynamic=False))
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for N in (16, 32, 48):
            found = compared("gelu", 16, N, 16, "cpu", Host(), rounds=2, autotuned=True)
            assert not found.failed
    assert len(compiled) == 3
