"""The charts of a device's newest run, and the chart of layout changes, which no device changes."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.dashboard.charts import Datum, Figure, Row, axis, lines, strip
from benchmarks.dashboard.tables import named, several, short, times, ways
from benchmarks.figures import TIMES, every_figure, other_timer, quantity
from benchmarks.record import Case, Run, printable

# (group, kind) -> title, what is measured, in this order. Other groups follow by their names.
KNOWN = {
    ("cross_entropy_speed", "time"): ("Losses", "Forward, backward; 100% is a copy of the logits, or three GEMMs."),
    ("attention_speed", "time"): ("Attention", "Forward, backward; 100% is the rate of a matmul."),
    ("step_speed", "time"): ("A training step on one GPU", "A Llama of 0.5 billion parameters, bf16 by autocast."),
    ("parallel_stacks", "host_time"): ("A step beside torch's whole stack", "Eight processes over gloo."),
    ("step_time", "host_time"): ("A training step", "Four processes over gloo."),
    ("sharded_optimizers", "host_time"): ("A step with sharded optimizers", "Four processes over gloo."),
    ("layers_cpu", "host_time"): ("Layers and products", "Forward and backward."),
    ("attention_cpu", "host_time"): ("Attention", "Forward and backward, on one thread."),
    ("llama_cpu", "host_time"): ("A Llama", "Beside that of transformers."),
    ("generate_cpu", "host_time"): ("Generation", "Beside that of transformers."),
    ("cross_entropy_cpu", "host_time"): ("Cross-entropy", "Forward and backward."),
    ("reshard_time", "host_time"): ("Layout changes", "Four processes over gloo, 64 MB on a mesh of 2x2."),
    ("reshard_bytes", "host_time"): ("Planning of a layout change", "Of one not planned before."),
    ("dispatch", "host_time"): ("Dispatch of an op", ""),
    ("survival", "host_time"): ("Checkpoints while training", ""),
    ("mesh", "host_time"): ("Meshes, layouts and inference", ""),
    ("cross_entropy", "count"): ("Memory traffic of cross-entropy", "6 bytes a logit are needed."),
    ("linear_cross_entropy", "count"): ("Memory that linear cross-entropy holds", "H=4096, V=128256, bf16."),
    ("layers", "count"): ("Memory traffic of layers", "An element of the input."),
    ("reshard_slow_axis", "count"): ("Bytes over a slow axis", "1 is the fewest possible."),
    ("loss_curves", "count"): ("Losses of one model on several meshes", "One seed, one order of data."),
}  # fmt: skip
CHARTED = ("bytes_a_logit", "bytes_an_element", "peak_bytes")  # of counted figures
ALONE = "one process"  # in the name of the way that other meshes' losses are told from
Curves = Mapping[str, Mapping[str, Mapping[int, float]]]  # by model, way and step: the loss


def title_of(group: str, kind: str) -> str:
    return KNOWN[group, kind][0] if (group, kind) in KNOWN else printable(group).replace("_", " ")


def groups(run: Run) -> list[tuple[str, str, list[Case]]]:
    """Group, kind and cases, KNOWN groups first; 4096 tokens come before 16384."""

    def natural(case: Case) -> list[tuple[int, str]]:
        return [(len(part) * part.isdecimal(), part) for part in re.split(r"(\d+)", case.name)]

    order = list(KNOWN)
    cases = sorted(run.cases, key=lambda case: (case.group, case.kind, natural(case), case.name))
    found = [(*key, list(some)) for key, some in itertools.groupby(cases, key=lambda case: (case.group, case.kind))]
    return sorted(found, key=lambda each: order.index(each[:2]) if each[:2] in KNOWN else len(order))


def is_rival(case: Case, cases: Sequence[Case]) -> bool:
    """Whether a case is Weft's or another implementation's; a roofline's measure or a repeated baseline is not."""
    roofed = {each.key[:2] for each in cases if each.way == "Weft" and "roofline" in each.numbers}
    measure = case.key[:2] in roofed and "roofline" not in case.numbers
    return case.ours or not (measure or case.way.endswith(" again"))


def of_group(group: str, kind: str, cases: Sequence[Case]) -> list[Figure]:
    """The charts of a group: times over Weft's, then roofline and memory; counted figures; or losses."""
    title, lead = title_of(group, kind), KNOWN.get((group, kind), ("", ""))[1]
    measured = [case for case in cases if case.status == "measured" and is_rival(case, cases)]
    if group == "loss_curves":
        return [*_of_losses(title, _curves(measured))]
    if kind == "count":
        return [*_amounts(title, lead, measured, CHARTED)]
    names = [{case.name for case in measured if (case.way == "Weft") == own} for own in (True, False)]
    over = [case for case in measured if case.name in names[0] & names[1]]
    rest = [case for case in measured if case not in over]
    made = [_over_weft(title, _note(lead, f"{named(TIMES[kind])} over Weft's"), over)] if over else []
    beside = ("roofline", "peak_bytes") if kind == "time" else ()
    return [*made, *_amounts(title, lead, rest, [TIMES[kind]]), *_amounts(title, lead, measured, beside)]


def _over_weft(title: str, note: str, cases: Sequence[Case]) -> Figure:
    """A strip: a row for each other way, a tick for each case. Times by another timer than Weft's are left out."""
    weft, label = {case.name: case for case in cases if case.way == "Weft"}, TIMES[cases[0].kind]
    rows = []
    for way in ways(case for case in cases if case.way != "Weft"):
        found = [case for case in cases if case.way == way and not other_timer(case, weft[case.name], label)]
        over = {case.name: case.seconds.over(weft[case.name].seconds) for case in found}
        told = {name: f"{times(ratio.median)} ({_range(map(times, ratio.ends))})" for name, ratio in over.items()}
        marks = [{"value": ratio.median, "tip": f"{way}, {name}: {told[name]}"} for name, ratio in over.items()]
        if marks:
            mean = statistics.geometric_mean(ratio.median for ratio in over.values())
            rows.append(Row(way, marks, times(mean), mean if len(marks) > 1 else None))
    scale = axis([0.5, 2, *(mark["value"] for row in rows for mark in row.marks)], "×")
    return strip(title, f"{note}, {several(len(weft), 'case')}", rows, scale, 1)


def _amounts(title: str, lead: str, cases: Sequence[Case], labels: Sequence[str]) -> Iterator[Figure]:
    """A strip for each figure: a row for each way, a tick for each case; a row for each case where there is one way."""
    for label in labels:
        some = [case for way in ways(cases) for case in cases if case.way == way and label in every_figure(case)]
        alone, timed = len({case.way for case in some}) == 1, label in TIMES.values()
        by_row: dict[str, list[Datum]] = {}
        for case in some:
            value = every_figure(case)[label]
            tip = f"{case.way}, {case.name}: {quantity(label, value)}"
            by_row.setdefault(case.name if alone else case.way, []).append({"value": value, "tip": tip})
        rows = []
        for name, marks in by_row.items():
            text = _range(short(label, end(mark["value"] for mark in marks)) for end in (min, max))
            rows.append(Row(name, marks, text, way=some[0].way if alone else name))
        if rows:
            values = [mark["value"] for row in rows for mark in row.marks]
            unit = "s" if timed else "%" if label == "roofline" else "B"
            scale = axis(values, unit, log=timed, domain=() if timed else (0, 1.05 * max(values) or 1))
            note = _note(lead, f"{named(label)}; {'more' if label == 'roofline' else 'less'} is better")
            yield strip(title, note, rows, scale, None if timed else 0)


def _note(lead: str, what: str) -> str:
    return f"{lead} {what[0].upper()}{what[1:]}".strip()


def _range(ends: Iterable[str]) -> str:
    return " to ".join(dict.fromkeys(ends))


def _curves(cases: Sequence[Case]) -> Curves:
    """The loss by model, way and step; one process comes first."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for case in sorted(cases, key=lambda case: (ALONE not in case.way, not case.ours, case.way)):
        if steps := case.curves.get("step"):
            found.setdefault(case.name, {})[case.way] = steps
    return found


def _apart(meshes: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    """Each later mesh's loss minus the first mesh's, relative to the first's, by step."""
    (_, own), *others = meshes.items()
    return {way: {step: loss / own[step] - 1 for step, loss in each.items() if own.get(step)} for way, each in others}


def _of_losses(title: str, found: Curves) -> Iterator[Figure]:
    """Two charts a model: the loss on the first mesh, and the differences of the others."""
    across = {"axis": {"title": "step", "grid": False, "tickCount": 6}}
    for name, meshes in found.items():
        first, apart = next(iter(meshes)), _apart(meshes)
        for note, some in (
            (f"Loss by step, {first}", {first: meshes[first]}),
            (f"Difference to {first}, relative", apart),
        ):
            points: list[Datum] = [
                {"name": way, "x": step, "value": each, "tip": f"{way}, step {step}: {each:.6g}"}
                for way, by_step in some.items()
                for step, each in by_step.items()
            ]
            if points:
                scale = axis([each["value"] for each in points], "e" if some is apart else "", log=False)
                yield lines(title, f"{note}; {name}", points, scale, across, named=some is apart, height=170)


def predicted(rows: Sequence[Mapping[str, Any]], beside: str) -> Figure:
    """A strip: a row for each figure, given or held out, and in it a tick for each step.

    beside: the key of the value that the prediction is divided by: "reported" or "measured".
    """
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for each in rows:
        by_name.setdefault(each["figure"] + (", held out" if each.get("held_out") else ""), []).append(each)
    strips = []
    for name, some in by_name.items():
        ratios = {each["row"]: each["predicted"] / each[beside] for each in some}
        errors = [abs(ratio - 1) for ratio in ratios.values()]
        text = f"off by {statistics.fmean(errors):.1%}, at most {max(errors):.1%}"
        marks = [{"value": ratio, "tip": f"{row}: {times(ratio)}"} for row, ratio in ratios.items()]
        strips.append(Row(name, marks, text, way="Weft"))
    scale = axis([0.8, 1.25, *(mark["value"] for each in strips for mark in each.marks)], "×")
    return strip(
        f"Predicted over {beside}", f"{several(len({each['row'] for each in rows}), 'step')}", strips, scale, 1
    )


def reshard(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """A strip for each mesh: a row for each engine, a mark for each ratio of bytes received to the fewest possible."""
    matrix = [each for each in rows if len(each["shape"]) == 2]
    most = max((float(ratio) for each in matrix for ratio in each["ratios"]), default=1)
    scale = axis([], "×", domain=(0.9, max(2, most * 1.15)))
    scale["axis"]["values"] = [2**power for power in range(12)]
    meshes: dict[str, list[Row]] = {}
    for each in matrix:
        pairs, marks = sum(each["ratios"].values()), []
        for ratio, count in each["ratios"].items():
            tip = f"{each['engine']}: {times(float(ratio))} in {count} of {pairs} pairs"
            marks.append({"value": float(ratio), "share": count / pairs, "tip": tip})
        text = f"{each['mean']:.2f}, at most {each['max']:.3g}"
        mesh = f"{each['mesh']}, {' x '.join(map(str, each['shape']))}"
        meshes.setdefault(mesh, []).append(Row(each["engine"], marks, text, each["mean"]))
    return [
        strip(mesh, "bytes over the fewest possible: mean, and at most", found, scale, 1)
        for mesh, found in meshes.items()
    ]
