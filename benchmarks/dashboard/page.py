"""The page: values into one HTML file in which every word is text, no script is, and nothing is asked of a network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from benchmarks.dashboard import changed, figures, tables
from benchmarks.dashboard.charts import Figure, svg
from benchmarks.dashboard.sources import Device, Results
from benchmarks.dashboard.tables import Table
from benchmarks.dashboard.tiles import tiles
from benchmarks.figures import quantity
from benchmarks.record import printable

HERE = Path(__file__).parent
TITLES = {  # by the kind of the cases
    "time": (
        "Kernels",
        "A GPU's times, by its own clock; a row is a way to compute it, a tick one of the shapes, a diamond the mean.",
    ),
    "host_time": (
        "Beside other implementations",
        "Their times over Weft's: to the right of 1 Weft is faster. A tick is a case, the diamond their geometric mean. All are "
        "times of a CPU, and say nothing of a GPU's speed.",
    ),
    "count": (
        "Counted, exactly",
        "What needs no clock, and is the same on any machine. A row is a way, a tick a case.",
    ),
}
PAST = (
    "A line is a case: the time of its first baseline over Weft's, which the machine does not change. It joins runs of one "
    "machine; marks of another than the newest run's are pale."
)
EVERY = "A table for each group of cases; × is a way's figure over Weft's, of a time with its spread. The last are of all runs."
RATIOS = (
    "What the busiest rank receives, on every pair of layouts {R, S(0), S(1), …} that needs bytes. A mark is a ratio, its area the "
    "share of the pairs that have it, the diamond their mean. DTensor's min-cost search is a private switch."
)


class Section(NamedTuple):
    id: str
    title: str
    lead: str = ""
    figures: Sequence[Figure] = ()
    remarks: Sequence[str] = ()
    tables: Sequence[Table] = ()


def page(results: Results) -> str:
    """The whole file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"printable": printable, "ceiling": _ceiling, "quantity": quantity, "link": _link}
    style = (HERE / "page.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        svg=svg,
        problems=results.problems,
        devices=[_shown(device, results.budgets) for device in results.devices],
        shared=_shared(results),
        raw=_raw(results),
    )


def _shown(device: Device, budgets: int) -> Mapping[str, Any]:
    """A device as the page shows it. id: what its anchors begin with."""
    id_ = f"device-{hashlib.sha256(device.name.encode()).hexdigest()[:6]}"
    runs, verdict, found = list(device.runs.values()), changed.verdict(device, budgets), figures.groups(device.newest)
    every = [tables.ways_side_by_side(group, figures.title_of(group, kind), cases) for group, kind, cases in found]
    every += [tables.over_the_runs(runs)] if len(runs) > 1 else []
    every += [tables.of_changes(device.comparison.changes)] if device.comparison and device.comparison.changes else []
    remarks = [
        *verdict.notes,
        *figures.differences(figures.curves(device.newest.cases)),
        *tables.unmeasured(device.newest.cases),
    ]
    sections = [
        Section(
            f"{id_}-{kind}",
            *TITLES[kind],
            [each for group in found if group[1] == kind for each in figures.of_group(*group)],
        )
        for kind in TITLES
    ]
    sections.append(Section(f"{id_}-history", "Over the runs", PAST, [*changed.history(device)]))
    last = Section(f"{id_}-tables", "Every number", EVERY, (), remarks, [*every, tables.of_runs(runs)])
    return {
        "id": id_,
        "name": "CPU" if device.is_cpu else printable(device.name),
        "run": device.newest,
        "changed": changed.changed(device),
        "verdict": verdict,
        "tiles": tiles(device.newest),
        "untimed": not device.timed,
        "sections": [*(each for each in sections if each.figures), last],
    }


def _shared(results: Results) -> list[Section]:
    """What is the same on every device."""
    made = []
    if results.engines:
        title = "Bytes of layout changes, over the fewest possible"
        made.append(
            Section(
                "every-ratio", title, RATIOS, figures.reshard(results.engines), (), [tables.engines(results.engines)]
            )
        )
    if rows := results.variants:
        targets = list(dict.fromkeys(row["target"] for row in rows))
        spills, variants = sum(row["spill_bytes"] > 0 for row in rows), len({row["variant"] for row in rows})
        registers, shared = (max(row[key] for row in rows) for key in ("registers", "shared_bytes"))
        told = (
            f"{variants} variants compiled for {len(targets)} targets by Triton {results.triton}, without a GPU: {spills or 'none'} of "
            f"{len(rows)} spill registers; at most {registers} registers and {quantity('bytes', shared)} of shared memory."
        )
        drawn, table = figures.compiled(rows, targets), tables.compiled(rows, targets)
        made.append(Section("compiled", "What the kernels cost, compiled", printable(told), drawn, (), [table]))
    return made


def _raw(results: Results) -> dict[str, str]:
    """The newest run of each device and the rows that all share, by the names of their files."""
    found = {f"{printable(device.name)}/{list(device.runs)[-1]}": device.newest.text() for device in results.devices}
    shared = {"reshard_bytes.json": results.engines, f"aot/triton-{results.triton}.json": results.variants}
    return found | {name: "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n" for name, rows in shared.items() if rows}


def _link(text: str) -> str:
    """The text as an address: a link to it downloads it, without a script and without a network."""
    return f"data:application/json;base64,{base64.b64encode(text.encode()).decode()}"


def _ceiling(name: str) -> str:
    """As in bf16, of bf16_flop_per_second: the amount has the unit."""
    return printable(re.sub("_(bytes|flop)_per_second$", "", name)).replace("_", " ")
