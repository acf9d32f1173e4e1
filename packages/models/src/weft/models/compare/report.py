"""`weft compare` of two runs' digests: the comparison, and the verdict as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .judge import Finding, Judge, shared_exact
from .record_file import RunDigests, read_digests


def compare_digests(runs: Sequence[RunDigests]) -> Judge:
    """Judge the common steps of two runs, until the first step unexplained by rounding.

    Raises ValueError for runs without a common step, and as `Judge`.
    """
    a, b = runs
    steps = sorted(a.steps.keys() & b.steps.keys())
    if not steps:
        shown = [f"{each.folder} of {_describe_steps(sorted(each.steps))}" for each in runs]
        raise ValueError(
            f"the runs have digests of no common step: {shown[0]}, {shown[1]}; train with the same --digests"
        )
    headers = [header for each in runs for header in each.headers.values()]
    ranks = max(math.prod(each.mesh.values()) for each in headers)
    judge = Judge((a.header_of(steps[0]), b.header_of(steps[0])), ranks=ranks, exact=shared_exact(headers))
    for step in steps:
        if judge.add(a.steps[step], b.steps[step], (a.steps.get(step - 1), b.steps.get(step - 1))):
            break
    return judge


def read_runs(folders: Sequence[Path]) -> list[RunDigests]:
    """The digests of each run. Raises ValueError as `read_digests`."""
    return [read_digests(each) for each in folders]


def _describe_steps(steps: Sequence[int]) -> str:
    """Steps in words: "step 1" or "12 steps, 1 to 110". steps: in ascending order."""
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"


def differing_facts(runs: Sequence[RunDigests]) -> dict[str, tuple[str | None, str | None]]:
    """The entries of `Header.arithmetic` that differ between two runs: {name: the value in each run, None if absent}.

    Empty if a run has no `plan.exact`.
    """
    a, b = (each.header.arithmetic for each in runs)
    if a is None or b is None:
        return {}
    return {name: (a.get(name), b.get(name)) for name in a | b if a.get(name) != b.get(name)}


def describe_facts(facts: Mapping[str, tuple[str | None, str | None]], names: tuple[str, str]) -> str:
    """`differing_facts` as a line of text; "" for none. names: of the two runs."""
    shown = [f"{fact} is {a} in {names[0]} and {b} in {names[1]}" for fact, (a, b) in facts.items()]
    return f"plan.exact does not promise these runs the same bits: {'; '.join(shown)}" if shown else ""


def verdict_of(judge: Judge) -> str:
    """The verdict in a word: "the same bits", "rounding" or "not rounding"."""
    if judge.finding is not None:
        return "not rounding"
    return "the same bits" if judge.same == judge.steps else "rounding"


def describe(judge: Judge, names: tuple[str, str]) -> str:
    """The verdict as lines of text. names: of the two runs."""
    found, plural = judge.finding, "" if judge.steps == 1 else "s"
    if found is not None:
        return "\n".join(_describe_finding(found, names))
    if judge.same == judge.steps:
        return f"the same bits in {judge.steps} step{plural}, {judge.tensors} tensors each"
    largest = judge.largest
    assert largest is not None, "a step has tensors"
    return (
        f"rounding, in {judge.steps} step{plural} of {judge.tensors} tensors each, of which {judge.same} have the same "
        f"bits: at most {_size(largest)} in {largest.what}, step {largest.step}, where rounding explains "
        f"{largest.allowed:.1e}"
    )


def _describe_finding(found: Finding, names: tuple[str, str]) -> list[str]:
    """The lines about a difference unexplained by rounding."""
    lines = [f"not rounding: step {found.step}, {found.phase}: {found.what}"]
    explained = (
        f"rounding explains nothing, since both runs take the sums of {found.exact}"
        if found.exact
        else f"rounding explains {found.allowed:.1e}, since {_inputs_of(found)} by at most {found.before:.1e}"
    )
    lines.append(f"  differs by {_size(found)}; {explained}")
    if found.ranks is not None:
        where = ", ".join(f"{start}:{stop}" for start, stop in found.slices)
        held = [
            f"rank {rank} of {name}" + (f" ({layout})" if layout else "")
            for rank, name, layout in zip(found.ranks, names, found.layouts, strict=True)
        ]
        lines.append(f"  {found.share:.0%} of it is in [{where}], on {held[0]} and {held[1]}")
    if found.ops:
        lines.append(f"  ops of the module: {', '.join(found.ops)}")
    return [*lines, *(f"  {note}" for note in found.notes)]


def _inputs_of(found: Finding) -> str:
    """In words, what `Finding.before` is the largest difference of, up to "by at most"."""
    if found.phase == "update":
        return "the parameter's gradients differ"
    if found.phase == "gradients" and found.ranks is not None:  # a parameter's gradient, not the norm
        return "all before the gradients differs"
    return "all before differs"


def _size(found: Finding) -> str:
    """The difference in words, relative and in ulps."""
    if math.isinf(found.difference) or math.isnan(found.difference):
        return "more than can be told: values are not finite, or zero in one run alone"
    return f"{found.difference:.1e} ({found.ulps:.3g} ulps of {found.dtype})"


def as_json(judge: Judge) -> dict[str, Any]:
    """The comparison as a dict of JSON types. Infinite numbers and NaN are None."""

    def plain(found: Finding | None) -> dict[str, Any] | None:
        if found is None:
            return None
        value = dataclasses.asdict(found) | {"ulps": found.ulps}
        return {
            name: None if isinstance(each, float) and not math.isfinite(each) else each for name, each in value.items()
        }

    return {
        "verdict": verdict_of(judge),
        "steps": judge.steps,
        "same_steps": judge.same,
        "tensors": judge.tensors,
        "finding": plain(judge.finding),
        "largest": plain(judge.largest),
    }
