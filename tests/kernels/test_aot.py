"""Every kernel compiled for absent GPUs, and compared with its recorded cost."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import triton
from weft.kernels.cross_entropy.launch import FUSED_STAGES
from weft.kernels.launching.aot import (
    TARGETS,
    VariantCost,
    as_json,
    as_table,
    compile_variant,
    extra_variants,
    save,
    variants,
)

from tests.kernels.matmul_kernels import PRODUCT as A_PRODUCT
from tests.support.pool import Pool

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks/results/aot" / f"triton-{triton.__version__}.json"
RENEW = "python -m weft.kernels.launching.aot --save benchmarks/results/aot"
STREAMED = {"bf16-contiguous", "fp16-contiguous", "fp32-contiguous"}
SHARED_KIB = {  # shared memory that a program can have
    "sm_80": 163, "sm_90": 227, "sm_100": 227,  # CUDA C++ Programming Guide, "Technical Specifications"
    "gfx942": 64,  # AMD Instinct MI300 (CDNA3) ISA: local data share of a work-group
}  # fmt: skip
MORE_REGISTERS = 8  # than kept: a warp is given registers by 8 a thread; CUDA Occupancy Calculator
NO_MORE = ("shared_bytes", "warps", "inner_instructions")
ALIKE = ("flop_per_byte", "accesses", "loop_accesses", "tensor_core", "inner_tensor_core")
# A tile of product/bf16 by one of four warps, or by all four: [128, 64] @ [64, 64] over the instruction's M * N * K.
PRODUCT = {
    "sm_80": ("mma.sync bf16", 128 * 64 * 64 // (16 * 8 * 16) // 4),
    "sm_90": ("wgmma.mma_async bf16", 128 * 64 * 64 // (64 * 64 * 16)),
    "sm_100": ("tcgen05.mma f16", 128 * 64 * 64 // (128 * 64 * 16)),
    "gfx942": ("v_mfma bf16", 128 * 64 * 64 // (32 * 32 * 8) // 4),
}

Reports = dict[tuple[str, str], dict[str, Any]]
# One worker of pytest-xdist runs all tests that read `compiled_once`.
SHARE_THE_COMPILED = pytest.mark.xdist_group("compiled for absent GPUs")
pytestmark = SHARE_THE_COMPILED


def by_variant_and_target(reports: Iterable[dict[str, Any]]) -> Reports:
    return {(report["variant"], report["target"]): report for report in reports}


def compiled(target: str) -> list[dict[str, Any]]:
    """The reports of `python -m weft.kernels.launching.aot --json`, and of a kernel that only the tests have."""
    return json.loads(as_json(compile_variant(variant, target) for variant in (*variants(), A_PRODUCT)))


def compiled_few() -> list[dict[str, Any]]:
    return json.loads(as_json(compile_variant(variant, FIRST) for variant in variants() if variant.name in FEW))


def compiled_extra_variants(target: str) -> list[dict[str, Any]]:
    return json.loads(as_json(compile_variant(variant, target) for variant in extra_variants()))


@functools.cache
def compiled_once(target: str) -> Reports:
    """Compiled by a fresh worker, whose kernels are not interpreted."""
    with Pool() as fresh:
        return by_variant_and_target(fresh.run(compiled, target, ranks=1)[0])


def reports_for(target: str) -> Reports:
    return {key: report for key, report in compiled_once(target).items() if key[0] != A_PRODUCT.name}


needs_kept = pytest.mark.skipif(not KEPT.exists(), reason=f"nothing is kept for triton {triton.__version__}; {RENEW}")
FIRST = "sm_90"  # the GPU of the kept results
# All variants of a target compile in a minute or two.
EACH_TARGET = pytest.mark.parametrize("target", TARGETS)
FEW = {"cross_entropy.statistics/bf16-contiguous", "cross_entropy.gradient/bf16-contiguous", "rope.turn/bf16-32x128"}


def differences(kept: Reports, fresh: Reports) -> list[str]:
    """Costs that rose or facts that changed, each as a line of text."""
    found = [f"{variant} for {target} is not kept" for variant, target in sorted(fresh.keys() - kept.keys())]
    found += [f"{variant} for {target} is kept, but is gone" for variant, target in sorted(kept.keys() - fresh.keys())]
    for variant, target in sorted(kept.keys() & fresh.keys()):
        was, is_ = kept[variant, target], fresh[variant, target]
        allowed = {"registers": was["registers"] + MORE_REGISTERS} | {name: was[name] for name in NO_MORE}
        dearer = [name for name, most in allowed.items() if is_[name] > most]
        changed = [name for name in ALIKE if is_[name] != was[name]]
        found += [f"{variant} for {target}: {name} {is_[name]}, kept {was[name]}" for name in dearer + changed]
    return found


@needs_kept
def test_a_few_kernels_cost_no_more_than_kept():
    with Pool() as fresh:
        reports = by_variant_and_target(fresh.run(compiled_few, ranks=1)[0])
    assert reports.keys() == {(name, FIRST) for name in FEW}
    assert_as_kept(reports)


@pytest.mark.exhaustive
@EACH_TARGET
def test_all_variants_compile(target):
    reports, names = reports_for(target), {variant.name for variant in variants()}
    assert {name.partition("/")[0] for name in names} >= {
        "cross_entropy.statistics", "cross_entropy.gradient", "cross_entropy.gradient_unless_guessed",
        "cross_entropy.statistics_and_gradient",
    }  # fmt: skip
    assert reports.keys() == {(name, target) for name in names}
    assert all(report["registers"] > 0 for report in reports.values())


@pytest.mark.exhaustive
@EACH_TARGET
def test_nothing_spills(target):
    spills = {key: report["spill_bytes"] for key, report in reports_for(target).items() if report["spill_bytes"]}
    assert spills == {}


@pytest.mark.exhaustive
@EACH_TARGET
def test_shared_memory_is_within_the_chip(target):
    largest = max(report["shared_bytes"] for report in reports_for(target).values())
    assert largest <= SHARED_KIB[target] * 1024


@pytest.mark.exhaustive
@needs_kept
@EACH_TARGET
def test_nothing_costs_more_than_kept(target):
    assert_as_kept(reports_for(target))


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
def test_further_choices_of_the_rules_spill_nothing_and_cost_no_more_than_kept(target):
    with Pool() as fresh:
        reports = by_variant_and_target(fresh.run(compiled_extra_variants, target, ranks=1)[0])
    assert {key: report["spill_bytes"] for key, report in reports.items() if report["spill_bytes"]} == {}
    assert max(report["shared_bytes"] for report in reports.values()) <= SHARED_KIB[target] * 1024
    if KEPT.exists():
        assert_as_kept(reports)


def assert_as_kept(fresh):
    """Compares the compiled variants with their recorded reports."""
    kept = by_variant_and_target(json.loads(KEPT.read_text()))
    found = differences({key: report for key, report in kept.items() if key in fresh}, fresh)
    assert not found, "\n".join([*found, f"if that is meant, keep it: {RENEW}"])


@needs_kept
def test_every_variant_is_kept_and_no_other():
    kept = [(report["variant"], report["target"]) for report in json.loads(KEPT.read_text())]
    names = [each.name for each in (*variants(), *extra_variants())]
    assert len(set(names)) == len(names)
    assert sorted(kept) == sorted((name, target) for name in names for target in TARGETS)


COST = {
    "registers": 40, "shared_bytes": 32, "warps": 4, "flop_per_byte": None,
    "accesses": {"load 128": 2}, "loop_accesses": {},
    "tensor_core": {}, "inner_tensor_core": {}, "inner_instructions": 70,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "found"),
    [
        pytest.param({"registers": 48}, [], id="within-budget"),
        pytest.param({"registers": 8, "shared_bytes": 0}, [], id="cheaper"),
        pytest.param({"registers": 49}, ["a for sm_90: registers 49, kept 40"], id="registers"),
        pytest.param({"shared_bytes": 33}, ["a for sm_90: shared_bytes 33, kept 32"], id="shared"),
        pytest.param(
            {"accesses": {"load 64": 4}}, ["a for sm_90: accesses {'load 64': 4}, kept {'load 128': 2}"], id="accesses"
        ),
        pytest.param(
            {"loop_accesses": {"load 128": 2}},
            ["a for sm_90: loop_accesses {'load 128': 2}, kept {}"],
            id="loop-accesses",
        ),
        pytest.param(
            {"tensor_core": {"mma.sync": 1}}, ["a for sm_90: tensor_core {'mma.sync': 1}, kept {}"], id="tensor-core"
        ),
        pytest.param({"warps": 8}, ["a for sm_90: warps 8, kept 4"], id="warps"),
        pytest.param({"inner_instructions": 71}, ["a for sm_90: inner_instructions 71, kept 70"], id="inner-loop"),
        pytest.param({"inner_instructions": 69}, [], id="shorter-inner-loop"),
    ],
)
def test_a_kernel_that_costs_more_is_found(change, found):
    assert differences({("a", "sm_90"): COST}, {("a", "sm_90"): COST | change}) == found


def test_variants_that_came_and_went_are_found():
    kept, fresh = {("a", "sm_90"): COST}, {("b", "sm_90"): COST}
    assert differences(kept, fresh) == ["b for sm_90 is not kept", "a for sm_90 is kept, but is gone"]


@pytest.mark.exhaustive
@EACH_TARGET
def test_loops_over_contiguous_memory_move_128_bits_at_a_time(target):
    """All loops over the classes do, and exactly once a pass; a row's few numbers are moved as they are."""
    loops = {name: report["loop_accesses"] for (name, _), report in reports_for(target).items()}
    loops = {name: kinds for name, kinds in loops.items() if re.match(r"cross_entropy\.\w+/\w+-contiguous", name)}
    assert {f"cross_entropy.{kernel}/{layout}" for kernel in ("statistics", "gradient") for layout in STREAMED} <= {
        *loops
    }
    for name, kinds in loops.items():
        logits = 1 if target.startswith("gfx") else 2  # 16-byte words of a thread
        classes = logits * (4 if "/fp32" in name else 8)
        weights = classes * 4 // 16 * ("sum-weighted" in name)
        read = 1
        fused = "statistics_and_gradient" in name
        if fused:  # a plain row is read ahead of the loop and in it, and again
            read = 2 if any(more in name for more in ("sum", "cap", "rival")) else FUSED_STAGES + 1
        wide = {"load 128": (logits + weights) * read}
        if "gradient" in name:
            of_row = target.startswith("gfx") and fused and "sum" in name  # the row's four statistics, 128 bits
            written = classes * 2 // 16 if "to_bf16" in name else logits  # AMD's threads have half a word: no 128 bits
            # The gradient, and the zeros of ignored rows.
            wide |= {"store 128": 2 * written + of_row} if written else {}
        assert {kind: count for kind, count in kinds.items() if kind.endswith("128")} == wide, name
        narrow = {kind: count for kind, count in kinds.items() if not kind.endswith("128")}
        assert not narrow or ("gradient" in name and max(narrow.values()) < classes + 4), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", sorted(STREAMED))
@pytest.mark.parametrize("name", ["statistics", "gradient"])
def test_contiguous_logits_move_128_bits_at_a_time(name, layout):
    accesses = Counter(reports_for(FIRST)[f"cross_entropy.{name}/{layout}", FIRST]["accesses"])
    bits = 32 if layout.startswith("fp32") else 16
    wide = 2  # 32 bytes of logits a thread
    rows = Counter({"load 64": 1, f"load {bits}": 1, "store 32": 3})  # the target and its logit; the statistics
    loops = Counter({"load 128": wide})
    if name == "gradient":
        # The target; three statistics, twice, since the first shard's are read before the loop; grad and denominator.
        rows = Counter({"load 64": 1, "load 32": 8})
        loops = Counter({"load 128": wide, "store 128": 2 * wide})  # of the gradient, and of the zeros of ignored rows
    assert accesses == rows + loops


@pytest.mark.exhaustive
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
        pytest.param("dropout.masked/bf16-contiguous-residual", {"load 128": 4, "store 128": 2}, id="dropout-residual"),
        pytest.param("swiglu.forward/bf16-silu", {"load 128": 4, "store 128": 2}, id="swiglu"),
        pytest.param("swiglu.backward/bf16-silu", {"load 128": 6, "store 128": 4}, id="swiglu-backward"),
        pytest.param("gelu.backward/bf16-gelu", {"load 128": 4, "store 128": 2}, id="gelu-backward"),
        pytest.param("rope.turn/bf16-32x128", {"load 128": 8, "store 128": 4}, id="rope"),
        pytest.param("routing.gather_rows/bf16", {"load 128": 1, "load 32": 1, "store 128": 1}, id="dispatch"),
        pytest.param("routing.sum_rows/bf16", {"load 128": 1, "load 32": 2, "store 128": 1}, id="combine"),
        pytest.param(
            "rms_norm.forward/bf16-4096-residual", {"load 128": 6, "store 128": 4, "store 32": 1}, id="add-rms_norm"
        ),
        pytest.param(
            "rms_norm.backward/bf16-16384", {"load 128": 12, "load 32": 1, "store 128": 12}, id="rms_norm-backward"
        ),
    ],
)
def test_operands_read_once_move_128_bits_at_a_time(variant, accesses):
    """16 elements of an operand a thread, 8 of a normal, and no library's table; a norm's row number is narrower."""
    assert reports_for(FIRST)[variant, FIRST]["accesses"] == accesses


def test_an_interpreted_kernel_is_refused(interpreted):
    from weft.kernels.launching.aot import compile_variant

    with pytest.raises(ValueError, match="unset TRITON_INTERPRET"):
        compile_variant(next(variants()), "sm_90")


@pytest.mark.exhaustive
@EACH_TARGET
def test_a_product_of_matrices_is_made_by_tensor_cores(target):
    report = compiled_once(target)[A_PRODUCT.name, target]
    kind, of_tile = PRODUCT[target]
    assert report["tensor_core"].keys() == {kind}
    assert report["tensor_core"][kind] % of_tile == 0  # once in the loop, and again where iterations are peeled
    threads = 4 * (64 if target.startswith("gfx") else 32)
    assert report["loop_accesses"] == {"load 128": (128 * 64 + 64 * 64) * 16 // 128 // threads}


REPORTS = [
    VariantCost(
        "room.kernel/bf16", "sm_90", 40, 0, 32, 4, 64.0, {"load 64": 1, "load 128": 2}, {"load 128": 2},
        {"mma.sync bf16": 8}, {"mma.sync bf16": 4}, 70,
    ),
    VariantCost("room.kernel/bf16", "gfx942", 35, 0, 0, 4, None, {"load 128": 1}, {}, {}, {}, 0),
]  # fmt: skip


def test_the_table_names_a_variant_once():
    _, variant, nvidia, amd = as_table(REPORTS).splitlines()
    assert variant == "room.kernel/bf16"
    assert (
        " ".join(nvidia.split())
        == "sm_90 40 0 32 4 12, 75.0% 64.0 70 mma.sync bf16: 4 load 64: 1, load 128: 2 load 128: 2"
    )
    assert " ".join(amd.split()) == "gfx942 35 0 0 4 - - 0 load 128: 1"


def test_a_report_is_kept_as_one_line(tmp_path):
    save(REPORTS, tmp_path / "aot")
    (file,) = (tmp_path / "aot").iterdir()
    assert file.name == f"triton-{triton.__version__}.json"
    first, *lines, last = file.read_text().splitlines()
    assert (first, last) == ("[", "]")
    assert [json.loads(line.removesuffix(","))["target"] for line in lines] == ["sm_90", "gfx942"]
    assert by_variant_and_target(json.loads(as_json(REPORTS))).keys() == {
        ("room.kernel/bf16", "sm_90"),
        ("room.kernel/bf16", "gfx942"),
    }


def test_an_unknown_target_is_refused():
    from weft.kernels.launching.aot import _gpu

    with pytest.raises(ValueError, match="'h100'; give an NVIDIA target such as 'sm_90'"):
        _gpu("h100")
