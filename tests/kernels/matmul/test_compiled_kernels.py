"""Matmul kernels compiled for absent GPUs: they use tensor cores, TMA, and specialized warps where they should."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.products import FORMATS
from tests.kernels.test_aot import EACH_TARGET, FIRST, SHARE_THE_COMPILED, reports_for
from tests.support.pool import Pool

pytestmark = SHARE_THE_COMPILED
MULTIPLIES = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
# By target, the dtypes' names in its instructions. A chip without e4m3 widens 8 bits; tcgen05 names all 16-bit dtypes
# alike.
DTYPES = {
    "sm_80": {"bf16": "bf16", "fp16": "f16", "tf32": "tf32", "fp8": "f16"},
    "sm_90": {"bf16": "bf16", "fp16": "f16", "tf32": "tf32", "fp8": "e4m3"},
    "sm_100": {"bf16": "f16", "fp16": "f16", "tf32": "tf32", "fp8": "f8f6f4"},
    "gfx942": {"bf16": "bf16", "fp16": "f16", "tf32": "xf32", "fp8": "fp8", "fp32": "f32"},
}
BY_DESCRIPTORS = (
    "bf16-bias-gelu-residual",
    "bf16-slope-of-gelu",
    "bf16-transposed-sum",
    "bf16-specialized",
    "fp16-relu",
    "fp8-scales",
    "bf16-swiglu",
)


def multiplications(report: dict[str, Any]) -> dict[str, int]:
    """The inner loop's multiplications, by instruction and dtype."""
    others = ("cp.async.bulk.tensor", "setmaxnreg")
    return {kind: count for kind, count in report["inner_tensor_core"].items() if kind not in others}


@pytest.mark.exhaustive
@EACH_TARGET
def test_products_are_made_by_tensor_cores_of_their_dtype(target: str) -> None:
    """float32 is multiplied without tensor cores on NVIDIA's chips, unless tf32 is asked for."""
    reports = {name: report for (name, _), report in reports_for(target).items() if "matmul" in name}
    assert len(reports) == 15
    for name, report in reports.items():
        of = DTYPES[target].get(re.split("[/-]", name)[1]) if "combine" not in name else None
        assert multiplications(report).keys() == ({f"{MULTIPLIES[target]} {of}"} if of else set()), name


@pytest.mark.exhaustive
@EACH_TARGET
def test_float32_is_cut_to_tf32_by_choice_alone(target: str) -> None:
    """In no part of the code, not in the inner loop alone."""
    single, cut = (reports_for(target)[f"matmul.product/{name}", target]["tensor_core"] for name in ("fp32", "tf32"))
    assert not any("tf32" in kind or "xf32" in kind for kind in single)
    assert any("tf32" in kind or "xf32" in kind for kind in cut)


@pytest.fixture
def settings() -> Iterator[Any]:
    """torch's of products on a GPU, which are set back."""
    found = torch.backends.cuda.matmul
    word, of_gpu = torch.get_float32_matmul_precision(), found.fp32_precision
    yield found
    torch.set_float32_matmul_precision(word)
    found.fp32_precision = of_gpu


@pytest.mark.parametrize(
    ("set_by", "given", "taken"),
    [
        pytest.param(None, None, "ieee", id="default"),
        pytest.param("precision", "highest", "ieee", id="highest"),
        pytest.param("precision", "high", "tf32", id="high"),
        pytest.param("backend", "ieee", "ieee", id="backend-ieee"),
        pytest.param("backend", "tf32", "tf32", id="backend-tf32"),
    ],
)
def test_a_launch_cuts_to_tf32_where_torch_is_told_so(
    set_by: str | None, given: str, taken: str, settings: Any
) -> None:
    """The two variants are compiled with the PRECISION values that launches pass here."""
    from weft.kernels.matmul import variants
    from weft.kernels.matmul.launch import precision

    if set_by == "precision":
        torch.set_float32_matmul_precision(given)
    if set_by == "backend":
        settings.fp32_precision = given
    with FakeTensorMode():
        found = {
            dtype: precision(torch.empty(4, 4, dtype=dtype, device="cuda")) for dtype in (torch.float32, torch.half)
        }
    assert found == {torch.float32: taken, torch.half: "ieee"}
    assert precision(torch.empty(4, 4)) == "ieee"  # there is none on a CPU
    compiled = {each.name: each.constexprs["PRECISION"] for each in variants.VARIANTS if "PRECISION" in each.constexprs}
    assert compiled.pop("matmul.product/tf32") == "tf32" and set(compiled.values()) == {"ieee"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BY_DESCRIPTORS)
def test_aligned_factors_are_loaded_by_tma(name: str) -> None:
    report = reports_for(FIRST)[f"matmul.product/{name}", FIRST]
    assert report["tensor_core"]["cp.async.bulk.tensor"] >= 3
    assert report["shared_bytes"] > 100 * 1024  # stages of tiles


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        "rows_by_group/bf16",
        "rows_by_group/bf16-bias-silu-residual",
        "rows_by_group/fp8-scales",
        "weights_by_group/bf16-sum",
    ],
)
def test_products_of_groups_are_loaded_by_tma_and_stored_in_words(name: str) -> None:
    report = reports_for(FIRST)[f"grouped_matmul.{name}", FIRST]
    assert report["tensor_core"]["cp.async.bulk.tensor"] >= 3
    assert {kind for kind in report["accesses"] if kind.startswith("store")} == {"store 128"}


@pytest.mark.exhaustive
def test_warps_are_specialized_where_the_configuration_says_so_and_nowhere_else() -> None:
    with_it = {name for (name, _), report in reports_for(FIRST).items() if "setmaxnreg" in report["tensor_core"]}
    assert with_it == {"matmul.product/bf16-specialized"}


@pytest.mark.exhaustive
def test_epilogues_store_128_bits_at_a_time() -> None:
    for name in BY_DESCRIPTORS:
        stores = {
            kind for kind in reports_for(FIRST)[f"matmul.product/{name}", FIRST]["accesses"] if kind.startswith("store")
        }
        assert stores == {"store 128"}, name


def spilling_candidates(name: str) -> list[str]:
    """The tuned configurations that spill registers: with bias and gelu, gated, and grouped."""
    from weft.kernels.grouped_matmul import kernel as of_groups
    from weft.kernels.grouped_matmul import launch as groups
    from weft.kernels.launching.aot import compile_variant
    from weft.kernels.matmul import variants
    from weft.kernels.matmul.configurations import ProductClass

    from benchmarks.tune_matmul import candidates

    of = {"fp16": "fp16", "fp32": "fp32", "tf32": "fp32", "fp8": variants.EIGHT}.get(name, "bf16")
    scales, precision = ("scales",) * (name == "fp8"), "tf32" if name == "tf32" else "ieee"
    out, found = "bf16" if name == "fp8" else of, []
    for kind in ("fused", "grouped") if name == "fp8" else ("fused", "gated", "grouped"):
        for each in candidates(ProductClass.of(FIRST, name, kind, "b", 64, 64, 64), FORMATS[name]):
            if kind == "grouped":
                given = groups.SCALES if scales else {}
                variant = groups._variant("rows_by_group/a", of_groups.rows_by_group, each, out, None, of, **given)
            else:
                asked = ("gated",) if kind == "gated" else ("bias", *scales)
                activation = None if kind == "gated" else "gelu"
                variant = variants._product(
                    "a", each, *asked, of=of, to=out, activation=activation, precision=precision
                )
            variant = replace(variant, constexprs={**variant.constexprs, "PRECISION": precision})
            report = compile_variant(variant, FIRST)
            if report.spill_bytes or report.shared_bytes > 227 * 1024:
                found.append(f"{kind}: {each} spills {report.spill_bytes}, shared {report.shared_bytes}")
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FORMATS)
def test_no_configuration_that_is_tuned_spills_on_an_h100(name: str) -> None:
    with Pool() as fresh:
        assert fresh.run(spilling_candidates, name, ranks=1) == [[]]
