"""What a visitor reads first: where Weft stands, in one sentence and four tiles, and whether the newest run passes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.dashboard.sources import Device
from benchmarks.dashboard.tables import times
from benchmarks.figures import TIMES, by_baseline, quantity
from benchmarks.record import Case, Run, printable

TILES = 4
CLAUSES = 2  # of the sentence
STEP = "step_time"  # the group of the training step whose collectives are told, where there are several


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One figure. clause: in the sentence.  label, value, beside: on a tile.  section: where its chart stands."""

    clause: str
    label: str
    value: str
    beside: str
    section: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """passes: None where there is nothing to judge by.  word: in one.  told: in a sentence.  lines: what broke."""

    passes: bool | None
    word: str
    told: str
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Headline:
    sentence: str
    tiles: tuple[Fact, ...]
    verdict: Verdict


def headline(device: Device, budgets: int, *, timed: bool) -> Headline:
    """timed: whether the newest run of any device, this or another, times a kernel."""
    found = list(facts(device.newest))[:TILES]
    sentence = _sentence(device, [fact.clause for fact in found[:CLAUSES]], timed)
    return Headline(sentence, tuple(found), verdict(device, budgets))


def _sentence(device: Device, clauses: Sequence[str], timed: bool) -> str:
    where = printable(device.name)
    if device.timed:
        start, by = f"On an {where}" if where.startswith("NVIDIA") else f"On {where}", ""
    elif device.is_cpu:
        start, by = "On a CPU no kernel is timed" if timed else "Not timed on a GPU yet", "; by count"
    else:
        start, by = f"On {where} no kernel is timed", "; by count"
    if not clauses:
        return f"{start}; nothing is measured that Weft can be compared by."
    return f"{start}{by}, {', and '.join(clauses)}."


def facts(run: Run) -> Iterator[Fact]:
    """What the run can say, the most telling first."""
    measured = [case for case in run.cases if case.status == "measured"]
    timed = [case for case in measured if case.kind == "time"]
    counted = [case for case in measured if case.kind == "count"]
    for found in (
        _roofline(timed),
        _speed(timed),
        _held(timed),
        _reshard(counted),
        _traffic(counted),
        _held(counted),
        _collectives(measured),
    ):
        if found:
            yield found


def _roofline(timed: Sequence[Case]) -> Fact | None:
    shares = [case.numbers["roofline"] for case in timed if case.way == "Weft" and "roofline" in case.numbers]
    if not shares:
        return None
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    told = low if low == high else f"{low.removesuffix('%')} to {high}"
    return Fact(
        clause=f"Weft's kernels reach {told} of the roofline",
        label="Share of the roofline",
        value=told.replace(" to ", "–"),
        beside=f"least to most of {_several(len(shares), 'shape')}; a copy of the data, or its GEMMs, is 100%",
        section="kernels",
    )


def _speed(timed: Sequence[Case]) -> Fact | None:
    means = {
        way: statistics.geometric_mean(labels[TIMES["time"]])
        for way, labels in by_baseline([case for case in timed if is_rival(case, timed)]).items()
        if TIMES["time"] in labels
    }
    if not means:
        return None
    first = "eager torch" if "eager torch" in means else max(means, key=lambda way: means[way])
    others = sorted((way for way in means if way != first), key=lambda way: -means[way])
    rest = "; ".join(f"{printable(way)} {times(means[way])}" for way in others)
    return Fact(
        clause=f"{printable(first)} takes {means[first]:.2f}× as long (geometric mean)",
        label=f"Time of {printable(first)} ÷ Weft's",
        value=times(means[first]),
        beside=f"geometric means of the shapes that each computes{': ' if rest else ''}{rest}",
        section="kernels",
    )


def _held(cases: Sequence[Case]) -> Fact | None:
    """Memory, where eager torch holds the most over Weft."""
    weft = {
        case.key[:2]: case.numbers["peak_bytes"]
        for case in cases
        if case.way == "Weft" and case.numbers.get("peak_bytes")
    }
    eager = [
        case for case in cases if case.way == "eager torch" and case.numbers.get("peak_bytes") and case.key[:2] in weft
    ]
    if not eager:
        return None
    most = max(eager, key=lambda case: case.numbers["peak_bytes"] / weft[case.key[:2]])
    own, other = (quantity("bytes", each, 3) for each in (weft[most.key[:2]], most.numbers["peak_bytes"]))
    return Fact(
        clause=f"holds {own} where eager torch holds {other}",
        label="Memory held",
        value=own,
        beside=f"eager torch {other}: {printable(most.name)}",
        section="kernels",
    )


def _reshard(counted: Sequence[Case]) -> Fact | None:
    """Over all meshes: Weft's most, and the largest of DTensor's means."""
    own = [
        case
        for case in counted
        if case.way == "Weft" and {"bytes_over_bound_mean", "bytes_over_bound_max"} <= case.numbers.keys()
    ]
    others = [case for case in counted if case.way == "DTensor" and "bytes_over_bound_mean" in case.numbers]
    if not own:
        return None
    most = max(case.numbers["bytes_over_bound_max"] for case in own)
    clause = f"layout changes {_over_bound(most)}"
    beside = f"the most over {_several(len(own), 'case')}"
    if others:
        worst = max(others, key=lambda case: case.numbers["bytes_over_bound_mean"])
        mean = worst.numbers["bytes_over_bound_mean"]
        mesh = printable(worst.name.partition(",")[0])
        clause += f" (DTensor {mean:.{0 if mean >= 10 else 1}f} times as many on average on {mesh})"
        beside += f"; DTensor {mean:.2f}× on average on {mesh}"
        if "bytes_over_bound_max" in worst.numbers:
            beside += f", {worst.numbers['bytes_over_bound_max']:.3g}× at the most"
    return Fact(
        clause=clause, label="Bytes received ÷ fewest possible", value=times(most), beside=beside, section="reshard"
    )


def _over_bound(most: float) -> str:
    if most < 1.005:
        return "never receive more bytes than the lower bound"
    return f"receive at most {most:.2f} times as many bytes as the lower bound"


def _traffic(counted: Sequence[Case]) -> Fact | None:
    """Of the form that others compute, too, and beside it theirs; where there is none, the most of all forms."""
    moved = {case.key: case.numbers["bytes_a_logit"] for case in counted if "bytes_a_logit" in case.numbers}
    own = {name: number for (_, name, way), number in moved.items() if way == "Weft"}
    if not own:
        return None
    others = {key: number for key, number in moved.items() if key[1] in own and not key[2].startswith("Weft")}
    plain = max({name for _, name, _ in others} or own, key=lambda name: own[name])
    rest = [
        f"{printable(way)}: {number:.2f}"
        for (_, name, way), number in sorted(others.items(), key=lambda each: each[1])
        if name == plain
    ]
    most = f"at most {max(own.values()):.2f} in {_several(len(own), 'form')}"
    return Fact(
        clause=f"cross-entropy moves {own[plain]:.2f} bytes a logit",
        label="Bytes moved a bf16 logit",
        value=f"{own[plain]:.2f} B",
        beside="; ".join(["forward and backward, 6 are needed", most, *rest]),
        section="kernels",
    )


def _collectives(measured: Sequence[Case]) -> Fact | None:
    counts = {case.key: case.numbers["collectives"] for case in measured if "collectives" in case.numbers}
    steps = [key for key in counts if key[2] == "Weft"]
    if not steps:
        return None
    own = next((key for key in steps if key[0] == STEP), steps[0])
    others = [
        f"{printable(key[2])} {count:g}"
        for key, count in counts.items()
        if key[:2] == own[:2] and not _again(key[2]) and key != own
    ]
    return Fact(
        clause=f"a training step issues {counts[own]:g} collectives",
        label="Collectives of a training step",
        value=f"{counts[own]:g}",
        beside="; ".join([*others, printable(own[1])]),
        section="models",
    )


def is_rival(case: Case, cases: Sequence[Case]) -> bool:
    """Whether a time is Weft's or that of another implementation: not of a roofline's measure, nor of the noise's."""
    roofed = {each.key[:2] for each in cases if each.way == "Weft" and "roofline" in each.numbers}
    measure = case.key[:2] in roofed and "roofline" not in case.numbers
    return case.ours or not (measure or _again(case.way))


def _again(way: str) -> bool:
    """A baseline measured a second time, which shows the noise."""
    return way.endswith(" again")


def verdict(device: Device, budgets: int) -> Verdict:
    found = device.comparison
    if found is None:
        return Verdict(passes=None, word="Not judged", told="the budgets cannot be read.")
    kernels = sum(change.case.ours and change.case.kind == "time" for change in found.changes)
    if found.failures:
        first = printable(found.failures[0].partition("\n")[0])
        told = f"{_several(len(found.failures), 'budget')} broken by the newest run, the first by {first}."
        return Verdict(passes=False, word="Fails", told=told, lines=found.failures, notes=found.notes)
    if not device.earlier:
        beside = "there is no earlier run to compare times with"
    elif kernels:
        beside = (
            f"{_several(kernels, 'kernel time')} compared with the median of {_several(device.earlier, 'earlier run')}"
        )
    else:
        beside = (
            f"nothing that {_several(device.earlier, 'earlier run')} measured is lost; times of a host have no budget"
        )
    met = budgets - sum(note.startswith("no case has the figure") for note in found.notes)
    if not met and not found.changes:
        return Verdict(
            passes=None, word="Not judged", told=f"none of its figures has a budget; {beside}.", notes=found.notes
        )
    kept = f"counted figures keep {met} of {_several(budgets, 'budget')}" if met else "none of its figures has a budget"
    return Verdict(passes=True, word="Passes", told=f"{kept}; {beside}.", notes=found.notes)


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
