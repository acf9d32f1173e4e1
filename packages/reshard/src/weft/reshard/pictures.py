"""A plan in words and pictures."""

from __future__ import annotations

from dataclasses import fields
from itertools import zip_longest
from typing import TYPE_CHECKING

from weft.mesh import Layout
from weft.mesh.picture import draw

from .costs import received_elements
from .steps import Step, Targeted, follow

if TYPE_CHECKING:
    from .plan import Plan


def explained(plan: Plan) -> str:
    """The plan's figures, then each step with who holds what before and after it."""
    received, bound = plan.max_received_bytes, plan.lower_bound_bytes
    gap = "as few as any plan" if received == bound else f"at least {bound:,} by the bound"
    if bound and received != bound:
        gap += f", {received / bound:.2f} times that"
    lines = [
        f"({plan.src}) -> ({plan.dst})",
        f"{plan.dtype} {plan.shape} on {plan.src.mesh}" + (f" -> {plan.dst.mesh}" if _crosses(plan) else ""),
        f"received by the busiest rank: {received:,} bytes, {gap}",
        f"alive at once on a rank: {plan.peak_bytes:,} bytes at most",
    ]
    if plan.topology is not None:
        lines.append(f"predicted time: {1e6 * plan.seconds:,.1f} us")
    if not plan.steps:
        lines.append("nothing to do")
    for number, (step, layout) in enumerate(zip(plan.steps, plan.layouts, strict=True), start=1):
        most = plan.dtype.itemsize * max(received_elements(step, layout, plan.shape, rank) for rank in plan.ranks)
        lines += ["", f"{number}. {written(step, layout)}: {most:,} bytes"]
        lines += [f"   {line}".rstrip() for line in _beside(layout, follow(step, layout), plan.shape)]
    return "\n".join(lines)


def written(step: Step, layout: Layout) -> str:
    """The step on one line, without its defaults; a target as its placements, with its mesh where that is another."""
    if isinstance(step, Targeted):
        there = "" if step.target.mesh == layout.mesh else f" on {step.target.mesh}"
        return f"{type(step).__name__}({step.target}{there})"
    values = [(f.name, getattr(step, f.name)) for f in fields(step) if getattr(step, f.name) != f.default]
    return f"{type(step).__name__}({', '.join(repr(v) if n == 'axis' else f'{n}={v!r}' for n, v in values)})"


def _crosses(plan: Plan) -> bool:
    return plan.src.mesh != plan.dst.mesh


def _beside(before: Layout, after: Layout, shape: tuple[int, ...]) -> list[str]:
    left, right = draw(before, shape), draw(after, shape)
    width, middle = max(map(len, left)), min(len(left), len(right)) // 2
    if width + max(map(len, right)) > 96:
        return [*left, "->", *right]
    arrows = ["->" if row == middle else "  " for row in range(max(len(left), len(right)))]
    return [f"{a or '':{width}}  {arrow}  {b or ''}" for a, arrow, b in zip_longest(left, arrows, right, fillvalue="")]
