"""What is the same on every device: every ratio of a layout change's bytes, and what the kernels cost compiled."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.dashboard import charts
from benchmarks.dashboard.blocks import Block
from benchmarks.dashboard.charts import Datum
from benchmarks.dashboard.panels import Figure
from benchmarks.dashboard.sources import Results
from benchmarks.dashboard.tables import Cell, Row, Table, times
from benchmarks.figures import ordered, quantity
from benchmarks.record import printable


def reshard(results: Results) -> list[Block]:
    """A chart for each mesh of the matrix, in which every ratio has its mark; tables of all shapes, and of every ratio."""
    if not results.engines:
        return []
    matrix = [row for row in results.engines if len(row["shape"]) == 2]
    most = max((float(ratio) for row in matrix for ratio in row["ratios"]), default=1)
    figures = [
        _mesh(mesh, [row for row in matrix if row["mesh"] == mesh], most)
        for mesh in dict.fromkeys(row["mesh"] for row in matrix)
    ]
    rows = tuple(
        Row(
            (printable(row["mesh"]), _shape(row), printable(row["engine"])),
            tuple(Cell(text) for text in (str(row["pairs"]), times(row["mean"]), times(row["max"]))),
        )
        for row in results.engines
    )
    return [
        Block(
            title="Bytes that the busiest rank receives, over the fewest possible: every ratio",
            lead="Counted, without a device. A mark is a ratio, its area the share of the pairs that have it, the bar their mean; the "
            "scale is logarithmic, and 1 is the fewest possible.",
            figures=tuple(figures),
            tables=(
                Table(
                    name="engines",
                    caption="Bytes over the bound, by mesh, shape and engine",
                    head=("mesh", "shape", "engine", "pairs", "mean", "most"),
                    rows=rows,
                ),
                Table(
                    name="ratios",
                    caption="Every ratio: how many pairs have it, and their share",
                    head=("mesh", "shape", "engine", "ratio", "pairs", "share"),
                    rows=tuple(_ratio(row, ratio) for row in results.engines for ratio in row["ratios"]),
                ),
            ),
        )
    ]


def _ratio(row: Mapping[str, Any], ratio: str) -> Row:
    count = row["ratios"][ratio]
    cells = (times(float(ratio), 3), str(count), f"{count / sum(row['ratios'].values()):.1%}")
    return Row((printable(row["mesh"]), _shape(row), printable(row["engine"])), tuple(map(Cell, cells)))


def _mesh(mesh: str, rows: Sequence[Mapping[str, Any]], most: float) -> Figure:
    data: list[Datum] = []
    for engine in ordered(row["engine"] for row in rows):
        row = next(row for row in rows if row["engine"] == engine)
        pairs = sum(row["ratios"].values())
        text = f"{row['mean']:.2f}, at most {row['max']:.3g}"
        each = {"label": printable(engine), "ours": engine == "Weft"}
        for ratio, count in row["ratios"].items():
            tip = f"{engine}: {ratio}× in {count} of {pairs} pairs"
            data.append(each | {"value": float(ratio), "share": count / pairs, "mean": None, "tip": printable(tip)})
        data.append(each | {"mean": row["mean"], "text": text})
    told = "; ".join(f"{each['label']} {each['text']}" for each in data if each["mean"] is not None)
    spec = charts.shares(data, charts.bound_axis(most))
    return Figure(
        title=printable(f"{mesh}, {_shape(rows[0])}"),
        note="mean, and at most",
        told=f"Every ratio on {printable(mesh)}: {told}.",
        spec=spec,
    )


def _shape(row: Mapping[str, Any]) -> str:
    return printable(" x ".join(map(str, row["shape"])))


def compiled(results: Results) -> list[Block]:
    """Registers by kernel and target, and all the rest in a table."""
    if not results.variants:
        return []
    targets = list(dict.fromkeys(row["target"] for row in results.variants))
    by_variant = {
        name: list(rows) for name, rows in itertools.groupby(results.variants, key=lambda row: row["variant"])
    }
    spills = sum(row["spill_bytes"] > 0 for row in results.variants)
    registers, shared = (max(row[key] for row in results.variants) for key in ("registers", "shared_bytes"))
    spilt = f"{spills} of {len(results.variants)} spill registers" if spills else "none spills a register"
    told = (
        f"{len(by_variant)} variants compiled for {len(targets)} targets by Triton {results.triton}, without a GPU: {spilt}; at most "
        f"{registers} registers and {quantity('bytes', shared)} of shared memory."
    )
    columns = [(target, key) for target in targets for key in ("registers", "spilt", "shared", "widest access")]
    table = Table(
        name="compiled",
        caption="Of each variant and target: registers a thread, bytes spilt, shared memory, widest load and store in bits",
        head=("variant", *(printable(f"{target} {key}") for target, key in columns)),
        rows=tuple(_variant(name, rows, targets) for name, rows in by_variant.items()),
    )
    return [
        Block(
            title="Registers a thread", lead=printable(told), figures=(_registers(results, targets),), tables=(table,)
        )
    ]


def _variant(name: str, rows: Sequence[Mapping[str, Any]], targets: Sequence[str]) -> Row:
    cells = []
    for target in targets:
        row = next((row for row in rows if row["target"] == target), None)
        if row is None:
            cells += [Cell("not compiled", missing=True), Cell(), Cell(), Cell()]
            continue
        numbers = (str(row["registers"]), quantity("bytes", row["spill_bytes"]), quantity("bytes", row["shared_bytes"]))
        cells += [Cell(each) for each in (*numbers, _widest(row["accesses"]))]
    return Row((printable(name),), tuple(cells))


def _widest(accesses: Mapping[str, int]) -> str:
    """As in 128 / 64: of the accesses "load 128", "load 32", "store 64"."""
    widths: dict[str, int] = {}
    for access in accesses:
        verb, _, bits = access.partition(" ")
        if bits.isdecimal():
            widths[verb] = max(widths.get(verb, 0), int(bits))
    return " / ".join(str(widths[verb]) if verb in widths else "none" for verb in ("load", "store"))


def _registers(results: Results, targets: Sequence[str]) -> Figure:
    data = [
        {
            "label": printable(row["variant"].partition("/")[0]),
            "name": printable(row["target"]),
            "value": row["registers"],
            "tip": printable(
                f"{row['variant']}, {row['target']}: {row['registers']} registers, {row['spill_bytes']} B spilt"
            ),
        }
        for row in results.variants
    ]
    kernels = len({each["label"] for each in data})
    told = f"Registers a thread of {len(data)} compiled variants of {kernels} kernels, for {', '.join(map(printable, targets))}."
    spec = charts.points(data, [printable(target) for target in targets])
    return Figure(
        title="by kernel",
        note="a mark for each variant, its form the target; fewer leave room for more warps",
        told=told,
        spec=spec,
        wide=True,
    )
