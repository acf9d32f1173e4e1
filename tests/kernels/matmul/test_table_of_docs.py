"""The page of products shows the numbers of the recorded reports."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

from weft.kernels.launching.aot import VariantCost, variants

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/kernels/matmul.md").read_text()


def line_of(report: VariantCost) -> str:
    """The row of the documentation's table, after the variant's name and tile."""
    multiplies = ", ".join(kind for kind in report.inner_tensor_core if "cp.async" not in kind) or "none"
    loop = f"{report.inner_instructions}, {multiplies}"
    share = f"{report.programs} of {report.warps} warps, {report.occupancy:.1%}"
    return f"| {report.registers} | {report.shared_bytes:,} | {share} | {report.flop_per_byte} | {loop} |"


def test_the_table_is_that_of_the_kept_reports() -> None:
    version = re.search(r"As compiled by triton (\S+) for sm_90", PAGE)
    assert version is not None
    kept = json.loads((ROOT / f"benchmarks/results/aot/triton-{version[1]}.json").read_text())
    costs = {each.name for each in fields(VariantCost)}
    reports = {
        each["variant"]: VariantCost(**{name: each[name] for name in costs})
        for each in kept
        if each["target"] == "sm_90"
    }
    shown = re.findall(r"^\| `((?:grouped_)?matmul\.\w+/[\w-]+)` \| [^|]+ (\|.*\|)$", PAGE, flags=re.MULTILINE)
    named = {each.name for each in variants() if "matmul." in each.name and "combine" not in each.name}
    assert {variant for variant, _ in shown} == named
    assert dict(shown) == {variant: line_of(reports[variant]) for variant, _ in shown}
    first = reports["matmul.product/bf16-bias-gelu-residual"]
    assert f"{first.registers} registers a thread and {first.shared_bytes:,} bytes" in PAGE
