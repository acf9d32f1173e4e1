"""A plan in words and pictures."""

from __future__ import annotations

from dataclasses import fields
from itertools import zip_longest
from typing import TYPE_CHECKING

from weft.mesh import Layout
from weft.mesh.picture import WIDTH as PICTURE_WIDTH
from weft.mesh.picture import draw

from .costs import received_elements
from .steps import Step, Targeted, follow

if TYPE_CHECKING:
    from .plan import Plan


WIDTH = 105  # columns of an explanation, if nothing else is asked for: two pictures of 48 stand side by side
LISTED = 16  # ranks whose bytes are listed one by one, where they differ
INDENT = "   "  # of the pictures


def explained(plan: Plan, width: int) -> str:
    """The plan's figures, then each step with who holds what before and after it, in `width` columns if it can be."""
    received, bound = plan.max_received_bytes, plan.lower_bound_bytes
    gap = "as few as any plan" if received == bound else f"at least {bound:,} by the bound"
    if bound and received != bound:
        gap += f", {received / bound:.2f} times that"
    lines = [
        f"({plan.src}) -> ({plan.dst})",
        f"{plan.dtype} {plan.shape} on {plan.src.mesh}" + (f" -> {plan.dst.mesh}" if _crosses(plan) else ""),
        f"received by the busiest rank: {received:,} bytes, {gap}",
        *_by_rank(plan),
        f"alive at once on a rank: {plan.peak_bytes:,} bytes at most",
    ]
    if plan.topology is not None:
        lines.append(f"predicted time: {1e6 * plan.seconds:,.1f} us")
    if not plan.steps:
        lines += ["nothing to do", *draw(plan.src, plan.shape, width=width)]
    for number, (step, layout) in enumerate(zip(plan.steps, plan.layouts, strict=True), start=1):
        most = plan.dtype.itemsize * max(received_elements(step, layout, plan.shape, rank) for rank in plan.ranks)
        lines += ["", f"{number}. {written(step, layout)}: {most:,} bytes"]
        pictures = _beside(layout, follow(step, layout), plan.shape, width - len(INDENT))
        lines += [f"{INDENT}{line}".rstrip() for line in pictures]
    return "\n".join(lines)


def _by_rank(plan: Plan) -> list[str]:
    """What each of a few ranks receives, where that differs."""
    received = {rank: plan.received_bytes(rank) for rank in plan.ranks[:LISTED]}
    if len(plan.ranks) > LISTED or len(set(received.values())) == 1:
        return []
    return ["received by each: " + ", ".join(f"rank {rank} {count:,}" for rank, count in received.items()) + " bytes"]


def written(step: Step, layout: Layout) -> str:
    """The step on one line, without its defaults; a target as its placements, with its mesh where that is another."""
    if isinstance(step, Targeted):
        there = "" if step.target.mesh == layout.mesh else f" on {step.target.mesh}"
        return f"{type(step).__name__}({step.target}{there})"
    values = [(f.name, getattr(step, f.name)) for f in fields(step) if getattr(step, f.name) != f.default]
    return f"{type(step).__name__}({', '.join(repr(v) if n == 'axis' else f'{n}={v!r}' for n, v in values)})"


def _crosses(plan: Plan) -> bool:
    return plan.src.mesh != plan.dst.mesh


def _beside(before: Layout, after: Layout, shape: tuple[int, ...], width: int) -> list[str]:
    left, right = (draw(layout, shape, width=min(width, PICTURE_WIDTH)) for layout in (before, after))
    room, middle = max(map(len, left)), min(len(left), len(right)) // 2
    if room + len("  ->  ") + max(map(len, right)) > width:
        return [*left, "->", *right]
    arrows = ["->" if row == middle else "  " for row in range(max(len(left), len(right)))]
    return [f"{a or '':{room}}  {arrow}  {b or ''}" for a, arrow, b in zip_longest(left, arrows, right, fillvalue="")]
