"""The kernels of products compiled for GPUs that need not be here: by tensor cores, by TMA, with warps told apart where they say so."""

from __future__ import annotations

import pytest

from tests.kernels.test_aot import EACH_TARGET, FIRST, reports_for

MULTIPLIES = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
BY_DESCRIPTORS = (
    "bf16-bias-gelu-residual",
    "bf16-slope-of-gelu",
    "bf16-transposed-sum",
    "bf16-specialized",
    "fp8-scales",
    "bf16-swiglu",
)


@EACH_TARGET
def test_products_are_made_by_tensor_cores(target: str) -> None:
    """float32 is multiplied as such, without them on NVIDIA's, unless tf32 is asked for."""
    reports = {name: report for (name, _), report in reports_for(target).items() if "matmul" in name}
    assert len(reports) == 12
    for name, report in reports.items():
        multiplies = "combine" not in name and ("/fp32" not in name or target.startswith("gfx"))
        assert (MULTIPLIES[target] in report["tensor_core"]) == multiplies, name


@pytest.mark.parametrize("name", BY_DESCRIPTORS)
def test_aligned_factors_are_loaded_by_tma(name: str) -> None:
    report = reports_for(FIRST)[f"matmul.product/{name}", FIRST]
    assert report["tensor_core"]["cp.async.bulk.tensor"] >= 3
    assert report["shared_bytes"] > 100 * 1024  # stages of tiles


@pytest.mark.parametrize("name", ["rows_by_group/bf16", "rows_by_group/bf16-bias-silu", "weights_by_group/bf16-sum"])
def test_products_of_groups_are_loaded_by_tma_and_stored_in_words(name: str) -> None:
    report = reports_for(FIRST)[f"grouped_matmul.{name}", FIRST]
    assert report["tensor_core"]["cp.async.bulk.tensor"] >= 3
    assert {kind for kind in report["accesses"] if kind.startswith("store")} == {"store 128"}


def test_warps_are_specialized_where_the_configuration_says_so_and_nowhere_else() -> None:
    with_it = {name for (name, _), report in reports_for(FIRST).items() if "setmaxnreg" in report["tensor_core"]}
    assert with_it == {"matmul.product/bf16-specialized"}


def test_epilogues_store_128_bits_at_a_time() -> None:
    for name in BY_DESCRIPTORS:
        stores = {
            kind for kind in reports_for(FIRST)[f"matmul.product/{name}", FIRST]["accesses"] if kind.startswith("store")
        }
        assert stores == {"store 128"}, name
