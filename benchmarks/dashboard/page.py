"""The page: values into one HTML file, in which every word is text and nothing is asked of a network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from benchmarks.dashboard import past, shared
from benchmarks.dashboard.blocks import Section, sections
from benchmarks.dashboard.changed import Changed, changed
from benchmarks.dashboard.headline import Headline, headline
from benchmarks.dashboard.past import Past
from benchmarks.dashboard.sources import Device, Results
from benchmarks.figures import quantity
from benchmarks.record import Run, printable

HERE = Path(__file__).parent
VEGA_LITE = "6.4"  # what altair writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A device as the page shows it. id: what its anchors begin with."""

    id: str
    name: str
    run: Run
    changed: Changed
    headline: Headline
    sections: Sequence[Section]
    past: Past


def page(results: Results) -> str:
    """The whole file."""
    timed = any(device.timed for device in results.devices)
    devices = [_shown(device, results.budgets, timed) for device in results.devices]
    reshard, compiled = shared.reshard(results), shared.compiled(results)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"printable": printable, "day": _day, "ceiling": _ceiling, "quantity": quantity}
    specs: list[dict[str, Any]] = []

    def keep(spec: dict[str, Any]) -> int:
        """The place of a chart among the page's charts."""
        specs.append(spec)
        return len(specs) - 1

    scripts = [_inline(_vega()), _inline((HERE / "page.js").read_text())]
    style = _inline((HERE / "page.css").read_text())
    body = environment.get_template("page.html").render(
        devices=devices, reshard=reshard, compiled=compiled, triton=results.triton, problems=results.problems, keep=keep,
        raw={name: len(text.encode()) for name, text in _raw(results).items()},
    )  # fmt: skip
    data = {"charts": specs, "past": {each.id: past.as_data(each.past) for each in devices}, "raw": _raw(results)}
    return environment.get_template("frame.html").render(
        policy=_policy(scripts, style),
        style=style,
        scripts=scripts,
        body=Markup(body),
        data=htmlsafe_json_dumps(data, separators=(",", ":")),
    )


def _shown(device: Device, budgets: int, timed: bool) -> Shown:
    name = "cpu" if device.is_cpu else re.sub("[^a-z0-9]+", "-", device.name.casefold()).strip("-") or "device"
    found = past.past(device)
    return Shown(
        id=f"on-{name}-{hashlib.sha256(device.name.encode()).hexdigest()[:4]}",
        name="CPU" if device.is_cpu else printable(device.name),
        run=device.newest,
        headline=headline(device, budgets, timed=timed),
        sections=sections(device.newest),
        changed=changed(device, found),
        past=found,
    )


def _raw(results: Results) -> dict[str, str]:
    """The newest run of each device and the rows that all share, by the names of their files."""
    found = {f"{printable(device.name)}/{list(device.runs)[-1]}": device.newest.text() for device in results.devices}
    if results.engines:
        found["reshard_bytes.json"] = _lines(results.engines)
    if results.variants:
        found[f"aot/triton-{results.triton}.json"] = _lines(results.variants)
    return found


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


@cache  # it takes two seconds
def _vega() -> str:
    """Vega, Vega-Lite and what embeds them."""
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    return bundle


def _inline(text: str) -> Markup:
    """What may stand inside of <script> or <style>: our own words and a library's, never those of the results."""
    return Markup(re.sub(r"</(?=script|style)", r"<\\/", text, flags=re.IGNORECASE))


def _policy(scripts: Sequence[str], style: str) -> str:
    """Only what this file holds runs, and nothing is fetched."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    ran = " ".join(digest(script) for script in scripts)
    return f"default-src 'none'; script-src {ran}; style-src {digest(style)}; img-src data:; base-uri 'none'; form-action 'none'"


def _ceiling(name: str) -> str:
    """As in bf16, of bf16_flop_per_second: the amount has the unit."""
    return printable(re.sub("_(bytes|flop)_per_second$", "", name)).replace("_", " ")


def _day(time: str) -> str:
    """As in 2026-03-01 12:00 UTC."""
    return f"{time[:10]} {time[11:16]} UTC"
