"""Every kernel compiled for a GPU that need not be here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

STREAMED = {"bf16-contiguous", "fp16-contiguous", "fp32-contiguous"}


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, object]]:
    """What the command prints for sm_90, by variant: in a process of its own, since here kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "weft.kernels.aot", "--target", "sm_90"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    return {line["variant"]: line for line in lines}


def test_both_kernels_of_cross_entropy_compile(reports):
    kernels = {name.partition("/")[0] for name in reports}
    assert kernels >= {"cross_entropy.statistics", "cross_entropy.gradient"}
    assert all(report["target"] == "sm_90" and report["registers"] > 0 for report in reports.values())


def test_nothing_spills(reports):
    assert {name: report["spill_bytes"] for name, report in reports.items() if report["spill_bytes"]} == {}


def test_shared_memory_is_within_the_chip(reports):
    largest = max(report["shared_bytes"] for report in reports.values())
    assert largest <= 227 * 1024  # compute capability 9.0, CUDA C++ Programming Guide, "Technical Specifications"


@pytest.mark.parametrize("layout", sorted(STREAMED))
@pytest.mark.parametrize("name", ["statistics", "gradient"])
def test_contiguous_logits_move_128_bits_at_a_time(reports, name, layout):
    accesses = Counter(reports[f"cross_entropy.{name}/{layout}"]["accesses"])
    bits = 32 if layout.startswith("fp32") else 16
    wide = 16 * bits // 128  # 16 classes a thread
    rows = Counter({"load 64": 1, f"load {bits}": 1, "store 32": 3})  # the target and its logit; the statistics
    loops = Counter({"load 128": wide})
    if name == "gradient":
        # The target; three statistics, twice, since the first shard's are read before the loop; grad and denominator.
        rows = Counter({"load 64": 1, "load 32": 8})
        loops = Counter({"load 128": wide, "store 128": 2 * wide})  # of the gradient, and of the zeros of ignored rows
    assert accesses == rows + loops


@pytest.mark.parametrize(
    ("variant", "accesses"),
    [
        pytest.param("random.uniform/fp32-aligned", {"store 128": 4}, id="uniform-fp32"),
        pytest.param("random.uniform/bf16-aligned", {"store 128": 2}, id="uniform-bf16"),
        pytest.param("random.normal/fp32-aligned", {"store 128": 2}, id="normal-fp32"),
        pytest.param("random.normal/bf16-aligned", {"store 128": 1}, id="normal-bf16"),
        pytest.param("dropout.masked/bf16-contiguous", {"load 128": 2, "store 128": 2}, id="dropout-bf16"),
        pytest.param("dropout.masked/fp16-contiguous", {"load 128": 2, "store 128": 2}, id="dropout-fp16"),
        pytest.param("dropout.masked/fp32-contiguous", {"load 128": 4, "store 128": 4}, id="dropout-fp32"),
        pytest.param("dropout.masked/bf16-strided", {"load 16": 16, "store 128": 2}, id="dropout-strided"),
    ],
)
def test_random_numbers_and_dropout_move_128_bits_at_a_time(reports, variant, accesses):
    assert reports[variant]["accesses"] == accesses  # 16 elements a thread, 8 of a normal; and no table of a library's


def test_an_interpreted_kernel_is_refused(interpreted):
    from weft.kernels.aot import compile_variant, variants

    with pytest.raises(ValueError, match="unset TRITON_INTERPRET"):
        compile_variant(next(variants()), "sm_90")


@pytest.mark.parametrize(
    ("code", "counted"),
    [
        pytest.param("ld.global.v4.b32 {%r1}, [%rd1];", {"load 128": 1}, id="v4"),
        pytest.param("@%p1 ld.global.L1::evict_last.b16 %rs1, [%rd1];", {"load 16": 1}, id="cache-hint"),
        pytest.param("st.global.b32 [%rd1], %r1;", {"store 32": 1}, id="store"),
        pytest.param("buffer_load_dwordx4 v[0:3], v1, s[0:3], 0", {"load 128": 1}, id="amd"),
        pytest.param("global_store_short v0, v1, s[0:1]", {"store 16": 1}, id="amd-short"),
        pytest.param("ld.shared.b32 %r1, [%r2];", {}, id="shared"),
    ],
)
def test_accesses_are_counted_by_width(code, counted):
    from weft.kernels.aot import accesses

    assert accesses(code) == counted


def test_an_unknown_target_is_refused():
    from weft.kernels.aot import _gpu

    with pytest.raises(ValueError, match="'h100'; give an NVIDIA one such as 'sm_90'"):
        _gpu("h100")
