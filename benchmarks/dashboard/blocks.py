"""What the newest run of a device shows: its groups of cases, each with charts and one table, in the page's sections."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.dashboard import curves, panels
from benchmarks.dashboard.panels import Figure
from benchmarks.dashboard.tables import Table, in_words, ways_side_by_side
from benchmarks.record import Case, Run, printable

HOST = "Host time, on a CPU: it says nothing of a GPU's speed."
# (group, kind) -> section, title, what is measured. Other groups stand by their names, under "Kernels" or "Also measured".
KNOWN = {
    ("cross_entropy_speed", "time"): (
        "kernels",
        "Losses, forward and backward",
        "Time on the GPU with a cold L2, the ways in turn. The roofline is a copy of the logits, for a shard one and a half, or the "
        "three GEMMs that no linear cross-entropy does without.",
    ),
    ("cross_entropy", "count"): (
        "kernels",
        "Device memory that cross-entropy moves",
        "Counted in Triton's interpreter, exactly, on the kernels that a GPU runs: 6 bytes a bf16 logit are needed, which is read "
        "twice and whose gradient is written.",
    ),
    ("linear_cross_entropy", "count"): (
        "kernels",
        "Memory that linear cross-entropy holds",
        "Counted on tensors without data: the most above inputs and gradients, H=4096, V=128256, bf16.",
    ),
    ("compiled", "count"): ("compiled", "Resources, compiled in this run", "Counted by the compiler; no clock."),
    ("reshard_bytes", "count"): (
        "reshard",
        "Bytes that the busiest rank receives, over the fewest possible",
        "Counted, on every pair of layouts {R, S(0), S(1), …} that needs bytes: 1 is the fewest possible. The mark is the mean of "
        "the pairs, the line ends at the most; the scale is logarithmic. DTensor's min-cost search is a private switch.",
    ),
    ("reshard_bytes", "host_time"): ("host", "Planning of a layout change not planned before", HOST),
    ("reshard_slow_axis", "count"): ("reshard", "Bytes over a slow axis", "Counted; 1 is the fewest possible."),
    ("reshard_time", "host_time"): (
        "reshard",
        "Host time of layout changes over gloo",
        f"Four processes, a mesh of 2x2, 64 MB. {HOST}",
    ),
    ("step_speed", "time"): (
        "models",
        "A training step on one GPU",
        "A Llama of 0.5 billion parameters in bfloat16 by autocast, with AdamW; the ways in turn.",
    ),
    ("step_time", "host_time"): (
        "models",
        "Host time of a training step over gloo",
        f"Four processes, checked to compute the same losses, then timed in turn. {HOST}",
    ),
    ("parallel_stacks", "host_time"): (
        "models",
        "Host time of a step beside torch's whole stack, over gloo",
        "Eight processes; parallelize_module, fully_shard and torch.distributed.pipelining compute the same losses, and are timed in "
        f"turn. {HOST}",
    ),
    ("sharded_optimizers", "host_time"): (
        "models",
        "Host time of a step with sharded optimizers, over gloo",
        f"Four processes, beside FSDP2 that keeps as much whole. {HOST}",
    ),
    ("loss_curves", "count"): (
        "models",
        "Losses of one model on several meshes",
        "One seed, one order of data: the curves lie on each other.",
    ),
    ("dispatch", "host_time"): ("host", "Dispatch of an op", HOST),
    ("mesh", "host_time"): ("host", "Meshes, layouts and inference", HOST),
}
SECTIONS = {
    "kernels": "Kernels",
    "reshard": "Reshard",
    "models": "Models",
    "host": "Host",
    "compiled": "Compiled in this run",
    "more": "Also measured",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """remarks: cases without figures, and what else is said in words.  stacked: its charts stand three in a row."""

    title: str
    lead: str = ""
    figures: tuple[Figure, ...] = ()
    remarks: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    name: str
    title: str
    lead: str = ""
    blocks: tuple[Block, ...] = field(default=())


def title_of(group: str, kind: str) -> str:
    """What the cases of a group are called."""
    return KNOWN[group, kind][1] if (group, kind) in KNOWN else printable(group).replace("_", " ")


def sections(run: Run) -> list[Section]:
    """All groups of the run; kernels are spoken of even where none is measured."""
    found: dict[str, list[tuple[int, Block]]] = {name: [] for name in SECTIONS}
    order = list(KNOWN)
    by_kind = sorted(run.cases, key=lambda case: (case.group, case.kind, _natural(case.name), case.name))
    for (group, kind), cases in itertools.groupby(by_kind, key=lambda case: (case.group, case.kind)):
        unknown = ("kernels" if kind == "time" else "more", "", HOST if kind == "host_time" else "")
        section, _, lead = KNOWN.get((group, kind), unknown)
        place = order.index((group, kind)) if (group, kind) in KNOWN else len(order)
        found[section].append((place, block(group, title_of(group, kind), lead, list(cases))))
    made = []
    for name, title in SECTIONS.items():
        blocks = tuple(each for _, each in sorted(found[name], key=lambda placed: placed[0]))
        lead = _without_times(run) if name == "kernels" else ""
        if blocks or lead:
            made.append(Section(name=name, title=title, lead=lead, blocks=blocks))
    return made


def block(group: str, title: str, lead: str, cases: Sequence[Case]) -> Block:
    """The charts that suit the cases, the words for those without figures, and the table of all."""
    table = ways_side_by_side(group, title, cases)
    measured = [case for case in cases if case.status == "measured"]
    if group == "loss_curves":
        figures, remarks = curves.figures(measured), curves.differences(measured)
    elif cases[0].kind != "count":
        figures, remarks = panels.of_times(measured), ()
    elif group == "reshard_bytes":
        figures, remarks = panels.over_bound(measured), ()
    else:
        figures, remarks = panels.of_counts(measured), ()
    return Block(
        title=title,
        lead=lead,
        figures=tuple(figures),
        remarks=(*remarks, *_unmeasured(cases)),
        tables=(table, *(curves.distances(measured) if group == "loss_curves" else ())),
        stacked=cases[0].kind == "time",
    )


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """4096 tokens come before 16384."""
    return [(part.isdecimal(), len(part) * part.isdecimal(), part) for part in re.split(r"(\d+)", name)]


def _unmeasured(cases: Sequence[Case]) -> list[str]:
    """One line for the same reason, however many cases have it."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        if case.status != "measured":
            by_reason.setdefault((printable(case.way), in_words(case)), []).append(printable(case.name))
    return [f"{way} is {reason} ({'; '.join(names)})" for (way, reason), names in by_reason.items()]


def _without_times(run: Run) -> str:
    if any(case.kind == "time" and case.status == "measured" for case in run.cases):
        return ""
    return (
        f"No kernel is timed on {'a CPU' if run.on_cpu else printable(run.device)}: what follows is counted, the same on any machine. "
        "A CPU's time is never shown as a kernel's speed."
    )
