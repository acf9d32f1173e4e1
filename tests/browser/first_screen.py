"""What stands first on the page, worked out from the JSON alone: no code of the page or of the benchmarks is used here."""

from __future__ import annotations

import math
import re
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.architecture.rules import ROOT

Row = dict[str, Any]
BUDGETS = tomllib.loads((ROOT / "benchmarks/budgets.toml").read_text())
TILES, CLAUSES, EARLIER = 4, 2, 5


@dataclass(frozen=True, slots=True)
class Tile:
    """value: its figure.  beside, clause: all that has a digit in the words under it, and in the sentence."""

    value: str
    beside: Sequence[str]
    clause: Sequence[str]


def check(shown: Row, runs: Sequence[Row]) -> None:
    """The facts, the sentence and the tiles of a device are those of its newest run."""
    newest = runs[-1]
    assert shown["facts"]["Device"] == ("CPU" if newest["device"] == "cpu" else newest["device"])
    assert shown["facts"]["Machine"] == where(newest)
    assert shown["facts"]["Commit"] == (newest["commit"][:10] or "unversioned") + " with changes" * newest["dirty"]
    assert shown["facts"]["Date"] == f"{newest['time'][:10]} {newest['time'][11:16]} UTC"
    assert shown["date"] == newest["time"]
    assert shown["word"] == verdict(runs)
    wanted = list(tiles(newest))[:TILES]
    assert [value for value, _ in shown["tiles"]] == [tile.value for tile in wanted]
    for (_, beside), tile in zip(shown["tiles"], wanted, strict=True):
        _says(beside, tile.beside)
    _says(shown["sentence"], [newest["device"], *(each for tile in wanted[:CLAUSES] for each in tile.clause)])
    timed = any(case["kind"] == "time" and case["status"] == "measured" for case in newest["cases"])
    assert ("no kernel is timed" in shown["sentence"] or "Not timed" in shown["sentence"]) == (not timed)


def where(run: Row) -> str:
    if not run.get("machine"):
        return "a machine that was not recorded"
    return "{cpu}, {cores} cores, load {load}".format(**run["machine"])


def _says(text: str, parts: Sequence[str]) -> None:
    """Each part, and no number besides."""
    for part in sorted(parts, key=len, reverse=True):
        assert part in text or part in ("cpu", *("NVIDIA H200",) * ("H200" not in text)), (part, text)
        text = text.replace(part, "", 1)
    assert not re.search(r"\d", text), text


def verdict(runs: Sequence[Row]) -> str:
    """By benchmarks/budgets.toml."""
    newest, earlier = runs[-1], runs[:-1][-EARLIER:]
    figures = {
        f"{case['name']} {key}": value
        for case in newest["cases"]
        if case["way"].split(",")[0] == "Weft" and case["status"] == "measured"
        for key, value in case.items()
    }
    budgets = {name: most for name, most in BUDGETS["counts"].items() if name in figures}
    broken = any(figures[name] > most for name, most in budgets.items())
    now = {_key(case): case for case in newest["cases"]}
    before: dict[tuple[str, ...], list[Row]] = {}
    for case in (case for run in earlier for case in run["cases"] if case["status"] == "measured"):
        before.setdefault(_key(case), []).append(case)
    compared, ratios = 0, {}
    for key, cases in before.items():
        own = key[2].split(",")[0] == "Weft"
        status = now[key]["status"] if key in now else "gone"
        gone = status == "gone" and not {key[1], ", ".join(key[1:])} & {*BUDGETS["retired"]}
        broken |= status == "failed" or gone or (status == "absent" and own)
        if status == "measured" and "seconds_median" in now[key]:
            compared += 1
            if own and now[key]["kind"] == "time":
                ratio, most = (
                    statistics.median(case[which] for case in cases) / now[key][other]
                    for which, other in (("seconds_median", "seconds_median"), ("seconds_p80", "seconds_p20"))
                )
                ratios.setdefault(key[0], []).append(ratio)
                broken |= ratio < BUDGETS["time"]["case"] and most < 1
    broken |= any(_mean(each) < BUDGETS["time"]["group"] for each in ratios.values())
    return "Fails" if broken else "Passes" if budgets or compared else "Not judged"


def tiles(run: Row) -> Iterator[Tile]:
    measured = [case for case in run["cases"] if case["status"] == "measured"]
    timed = [case for case in measured if case["kind"] == "time"]
    counted = [case for case in measured if case["kind"] == "count"]
    yield from _roofline(timed)
    yield from _speed(timed)
    yield from _held(timed)
    yield from _reshard(counted)
    yield from _moved(counted)
    yield from _held(counted)
    yield from _collectives(measured)


def _roofline(timed: Sequence[Row]) -> Iterator[Tile]:
    shares = [round(case["roofline"] * 100) for case in timed if case["way"] == "Weft" and "roofline" in case]
    if shares:
        least, most = min(shares), max(shares)
        ends = (f"{least}–{most}%", f"{least} to {most}%") if least < most else (f"{least}%", f"{least}%")
        yield Tile(ends[0], [f"{len(shares)} shape", "is 100%"], [ends[1]])


def _speed(timed: Sequence[Row]) -> Iterator[Tile]:
    own = {case["name"]: case for case in timed if case["way"] == "Weft"}
    rivals: dict[str, list[float]] = {}
    for case in timed:
        weft = own.get(case["name"])
        measure = weft is not None and "roofline" in weft and "roofline" not in case
        if weft and not case["way"].startswith("Weft") and not case["way"].endswith("again") and not measure:
            rivals.setdefault(case["way"], []).append(case["seconds_median"] / weft["seconds_median"])
    means = {way: f"{_mean(each):.2f}×" for way, each in rivals.items()}
    if means:
        first = "eager torch" if "eager torch" in means else max(means, key=lambda way: _mean(rivals[way]))
        others = [f"{way} {mean}" for way, mean in means.items() if way != first]
        yield Tile(means[first], others, [f"{first} takes {means[first]}"])


def _held(some: Sequence[Row]) -> Iterator[Tile]:
    held = {(case["name"], case["way"]): case["peak_bytes"] for case in some if case.get("peak_bytes")}
    names = [name for name, way in held if way == "eager torch" and (name, "Weft") in held]
    if names:
        most = max(names, key=lambda name: held[name, "eager torch"] / held[name, "Weft"])
        own, other = (_bytes(held[most, way]) for way in ("Weft", "eager torch"))
        yield Tile(own, [f"eager torch {other}", most], [f"holds {own} where eager torch holds {other}"])


def _reshard(counted: Sequence[Row]) -> Iterator[Tile]:
    both = {"bytes_over_bound_mean", "bytes_over_bound_max"}
    own = [case["bytes_over_bound_max"] for case in counted if case["way"] == "Weft" and both <= set(case)]
    others = [case for case in counted if case["way"] == "DTensor" and both <= set(case)]
    if own:
        most = f"{max(own):.2f}"
        clause = [] if most == "1.00" else [f"at most {most} times as many bytes as the lower bound"]
        beside = [f"{len(own)} case"]
        if others:
            worst = max(others, key=lambda case: case["bytes_over_bound_mean"])
            mean, mesh = worst["bytes_over_bound_mean"], worst["name"].split(",")[0]
            beside += [f"DTensor {mean:.2f}× on average on {mesh}", f"{worst['bytes_over_bound_max']:.3g}× at the most"]
            clause.append(f"DTensor {mean:.0f} times" if mean >= 10 else f"DTensor {mean:.1f} times")
            clause.append(f"on average on {mesh}")
        yield Tile(f"{most}×", beside, clause)


def _moved(counted: Sequence[Row]) -> Iterator[Tile]:
    """Liger computes the plain form alone, so that Weft's plain form is what it is compared with."""
    moved = {(case["name"], case["way"]): case["bytes_a_logit"] for case in counted if "bytes_a_logit" in case}
    own = [each for (_, way), each in moved.items() if way == "Weft"]
    if own:
        plain = moved["cross_entropy", "Weft"]
        rest = [f"{way}: {each:.2f}" for (_, way), each in moved.items() if way != "Weft"]
        yield Tile(
            f"{plain:.2f} B",
            ["6 are needed", f"at most {max(own):.2f} in {len(own)} form", *rest],
            [f"{plain:.2f} bytes a logit"],
        )


def _collectives(measured: Sequence[Row]) -> Iterator[Tile]:
    counted = [case for case in measured if "collectives" in case]
    step = [case for case in counted if case["group"] == "step_time"]  # the README's, where there are several
    by_way = {case["way"]: case for case in step or counted}
    if "Weft" in by_way:
        others = [f"{way} {case['collectives']}" for way, case in by_way.items() if way not in ("Weft", "torch again")]
        yield Tile(str(by_way["Weft"]["collectives"]), [*others, by_way["Weft"]["name"]], [])


def _bytes(number: float) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"


def _key(case: Row) -> tuple[str, ...]:
    return case["group"], case["name"], case["way"]


def _mean(ratios: Sequence[float]) -> float:
    return math.prod(ratios) ** (1 / len(ratios))
