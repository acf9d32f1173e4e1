"""The page: one HTML file. Every word is escaped, there is no script, and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
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
TITLES = {"time": "Kernels", "host_time": "Beside other implementations", "count": "Counted, exactly"}  # by kind


class Section(NamedTuple):
    """A section. kind: its anchor, and the key of its lead in the template; told: a lead of its own."""

    kind: str
    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    remarks: Sequence[str] = ()
    told: str = ""


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
    """A device's values for the template. id: the prefix of the device's anchors."""
    id_ = f"device-{hashlib.sha256(device.name.encode()).hexdigest()[:6]}"
    runs, verdict, found = list(device.runs.values()), changed.verdict(device, budgets), figures.groups(device.newest)
    every = [tables.ways_side_by_side(group, figures.title_of(group, kind), cases) for group, kind, cases in found]
    every += [tables.over_the_runs(runs)] if len(runs) > 1 else []
    every += [tables.of_changes(device.comparison.changes)] if device.comparison and device.comparison.changes else []
    remarks = [*verdict.notes, *tables.unmeasured(device.newest.cases)]
    drawn = {
        kind: [each for group in found if group[1] == kind for each in figures.of_group(*group)] for kind in TITLES
    }
    sections = [Section(kind, TITLES[kind], drawn[kind]) for kind in TITLES]
    sections.append(Section("history", "Over the runs", [*changed.history(device)]))
    last = Section("tables", "Every number", (), [*every, tables.of_runs(runs)], remarks)
    return {
        "id": id_,
        "name": "CPU" if device.newest.on_cpu else printable(device.name),
        "run": device.newest,
        "changed": changed.changed(device),
        "verdict": verdict,
        "tiles": tiles(device.newest),
        "sections": [*(each for each in sections if each.figures), last],
    }


def _shared(results: Results) -> list[Section]:
    """Sections about every device: layout changes, predictions of steps, and compiled kernels."""
    made = []
    if results.engines:
        title, drawn = "Bytes of layout changes, over the fewest possible", figures.reshard(results.engines)
        made.append(Section("every-ratio", title, drawn, [tables.engines(results.engines)]))
    here = tuple(chain.from_iterable(results.measured.values()))
    for kind, rows, beside, title in (
        ("predicted", results.predictions, "reported", "Published steps, predicted beside reported"),
        ("measured", here, "measured", "Steps run here, predicted beside measured"),
    ):
        if rows:
            drawn = [figures.predicted(rows, beside)]
            made.append(Section(kind, title, drawn, [tables.predictions(rows, beside)]))
    if rows := results.variants:
        spills = sum(row["spill_bytes"] > 0 for row in rows)
        registers, shared = (max(row[key] for row in rows) for key in ("registers", "shared_bytes"))
        told = (
            f"{len(rows)} kernels, each variant for each target, compiled by Triton {results.triton} without a GPU: "
            f"{spills or 'none'} spill registers; at most {registers} registers and {quantity('bytes', shared)} of "
            f"shared memory."
        )
        made.append(
            Section("compiled", "What the kernels cost, compiled", (), [tables.compiled(rows)], (), printable(told))
        )
    return made


def _raw(results: Results) -> dict[str, str]:
    """The files to download, by name: each device's newest run, and the files about every device."""
    found = {f"{printable(device.name)}/{list(device.runs)[-1]}": device.newest.text() for device in results.devices}
    shared = {
        "reshard_bytes.json": results.engines,
        "predicted.json": results.predictions,
        **results.measured,
        f"aot/triton-{results.triton}.json": results.variants,
    }
    return found | {name: "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n" for name, rows in shared.items() if rows}


def _link(text: str) -> str:
    """The text as a data: address, which a link downloads."""
    return f"data:application/json;base64,{base64.b64encode(text.encode()).decode()}"


def _ceiling(name: str) -> str:
    """bf16_flop_per_second is shown as bf16: the amount has the unit."""
    return printable(re.sub("_(bytes|flop)_per_second$", "", name)).replace("_", " ")
