"""What the page's tables must hold, worked out from the JSON alone: no code of the page or of the benchmarks is used here."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
HEAD = ("group", "name", "way", "kind", "status")
PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}
NUMBER = re.compile(r"(-?[\d.]+(?:e[+-]?\d+)?)(%|×)?(?: ([TGMkmµn]?)(?:s|B|B/s|flop|flop/s)?)?")
WORDS = {
    "seconds_median": "time",
    "roofline": "share of the roofline",
    "peak_bytes": "memory above inputs and gradients",
    "gradient_bytes": "memory of the gradients",
    "gathered_bytes_a_token": "bytes gathered a token",
    "bytes_over_bound_mean": "bytes over the bound, mean",
    "bytes_over_bound_max": "bytes over the bound, most",
    "share_above_bound": "share of pairs above the bound",
    "unneeded": "pairs that need nothing, yet receive",
}
TIMERS = {"events": "CUDA events", "graph": "CUDA graph, replayed"}
SECONDS = ("seconds_p20", "seconds_median", "seconds_p80")


def shows(text: str, value: Any) -> bool:
    """A word as it is; a number equal to the digits that are shown: four, one after the point of a percentage, two of a ratio."""
    if isinstance(value, str):
        return text == value
    told = NUMBER.fullmatch(text)
    if not told:
        return False
    number = float(told[1]) * (0.01 if told[2] == "%" else 1) * PREFIXES[told[3] or ""]
    slack = 5.1e-4 if told[2] == "%" else max(5.1e-4 * abs(value), 0.00501 if told[2] == "×" else 0)
    return math.isclose(number, value, rel_tol=0, abs_tol=slack)


def devices(folder: Path) -> list[list[Row]]:
    """The runs that can be read, oldest first; a GPU's before a CPU's."""
    found: dict[str, list[Row]] = {}
    for file in sorted(folder.glob("*/2*Z_*.json")):
        text = file.read_text()
        run = json.loads(text) if len(text) > 20 else {}
        if run.get("schema") == 1 and "A100" not in run["device"]:
            found.setdefault(run["device"], []).append(run)
    return [found[device] for device in sorted(found, key=lambda device: (device == "cpu", device))]


def tables(runs: list[Row]) -> dict[str, dict[tuple[str, ...], list[Any]]]:
    """Of each table of a device, by the heads of its row and its column: what a cell shows, and what small under it."""
    made: dict[str, dict[tuple[str, ...], list[Any]]] = {}
    newest = {(case["group"], case["name"], case["way"], case["kind"]): case for case in runs[-1]["cases"]}
    for (group, name, way, kind), case in newest.items():
        weft = newest.get((group, name, "Weft", kind), {})
        cells = made.setdefault(f"group {group} {kind}", {})
        for key, value in case.items() if case["status"] == "measured" else ():
            if key in HEAD or key in (SECONDS[0], SECONDS[2]) or (key, kind) == ("timer", "host_time"):
                continue
            over = (
                []
                if way == "Weft" or key == "roofline" or isinstance(value, str) or not weft.get(key)
                else [value / weft[key]]
            )
            if key == SECONDS[1]:
                over += _over(case, weft)[::2] if over else []
                over += [case[each] for each in SECONDS[::2]] if SECONDS[0] in case else []
            cells[name, _word(key, kind), way] = [TIMERS.get(value, value) if key == "timer" else value, *over]
    made["runs"] = {
        (str(at + 1), "commit"): [run["commit"][:10] + " with changes" * run["dirty"]] for at, run in enumerate(runs)
    }
    made["runs"] |= {
        (str(at + 1), "machine"): [run.get("machine", {}).get("cpu", "not recorded")] for at, run in enumerate(runs)
    }
    history = {
        (*key[:3], _word(SECONDS[1], key[3]), f"{run['time'][:10]} {run['commit'][:7]}"): [
            case[each] for each in (SECONDS[1], *SECONDS[::2])
        ]
        for key in newest
        for run in runs
        for case in run["cases"]
        if [case[each] for each in HEAD[:4]] == [*key] and SECONDS[0] in case and SECONDS[1] in newest[key]
    }
    changes = {(*heads, column): [value] for heads, cells in _changes(newest, runs) for column, value in cells.items()}
    return (
        made | ({"history": history} if len(runs) > 1 and history else {}) | ({"changes": changes} if changes else {})
    )


def _word(key: str, kind: str) -> str:
    return WORDS.get(key, key.replace("_", " ")) if (key, kind) != (SECONDS[1], "host_time") else "host time"


def _over(case: Row, other: Row) -> list[float]:
    """The ratio of two times, with its spread: p20 over p80, median over median, p80 over p20."""
    return [
        case.get(one, case[SECONDS[1]]) / other.get(two, other[SECONDS[1]])
        for one, two in zip(SECONDS, SECONDS[::-1], strict=True)
    ]


def _changes(newest: dict[tuple[str, ...], Row], runs: list[Row]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Of each time of Weft's the verdict: by all baselines, whether the spreads of their ratios now and before lie apart."""
    for (group, name, way, kind), case in newest.items():
        machine = [runs[-1].get("machine", {}).get(each) for each in ("cpu", "cores")]
        alike = [
            {tuple(each[which] for which in HEAD[:4]): each for each in run["cases"] if SECONDS[1] in each}
            for run in runs[:-1]
            if kind == "time"
            or ([run.get("machine", {}).get(each) for each in ("cpu", "cores")] == machine and machine[0])
        ]
        before = [cases for cases in alike[-5:] if (group, name, way, kind) in cases]
        if SECONDS[1] not in case or way.replace(",", " ").split()[0] != "Weft" or not before:
            continue
        words = set()
        for other, base in newest.items():
            past = [cases for cases in before if other in cases and cases[other].get("timer") == base.get("timer")]
            alone = (
                (other[0], other[1], other[3]) != (group, name, kind)
                or other[2].startswith("Weft")
                or SECONDS[1] not in base
            )
            if alone or not past or base.get("timer") != case.get("timer"):
                continue
            then = [
                statistics.median(each)
                for each in zip(*(_over(old[other], old[group, name, way, kind]) for old in past), strict=True)
            ]
            now = _over(base, case)
            words.add("slower" if now[2] < then[0] else "faster" if now[0] > then[2] else "within the spread")
        word = words.pop() if len(words) == 1 else "within the spread" if words else "not judged"
        seconds = statistics.median(cases[group, name, way, kind][SECONDS[1]] for cases in before)
        cells = {"time before": seconds, "time now": case[SECONDS[1]], "verdict": word}
        yield (group, name, way, _word(SECONDS[1], kind)), cells


def shared(folder: Path) -> dict[str, dict[tuple[str, ...], list[Any]]]:
    """Of what is the same on all devices, where it can be read."""
    found: dict[str, dict[tuple[str, ...], list[Any]]] = {"engines": {}, "compiled": {}}
    for row in json.loads((folder / "reshard_bytes.json").read_text()):
        heads = (row["mesh"], " x ".join(map(str, row["shape"])), row["engine"])
        found["engines"] |= {
            (*heads, "pairs"): [row["pairs"]],
            (*heads, "mean"): [row["mean"]],
            (*heads, "most"): [row["max"]],
        }
    for row in json.loads((folder / "aot/triton-3.7.1.json").read_text()):
        columns = {"registers": row["registers"], "spilt": row["spill_bytes"], "shared": row["shared_bytes"]}
        found["compiled"] |= {(row["variant"], f"{row['target']} {word}"): [value] for word, value in columns.items()}
    return found
