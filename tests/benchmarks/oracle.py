"""What the page's tables must hold, worked out from the JSON alone, without code of the page or the benchmarks."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# (table, heads of the row, column) -> the figure in the cell, and the figures in small print below.
Cells = dict[tuple[str, ...], list[Any]]
HEAD = ("group", "name", "way", "kind", "status")
PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}
NUMBER = re.compile(r"(-?[\d.]+(?:e[+-]?\d+)?)(%|×)?(?: ([TGMkmµn]?)(?:s|B|B/s|flop|flop/s)?)?")
WORDS = {
    "seconds_median": "time",
    "roofline": "share of the roofline",
    "peak_bytes": "memory above inputs and gradients",
    "unneeded": "pairs that need nothing, yet receive",
}
TIMERS = {"events": "CUDA events", "graph": "CUDA graph, replayed"}
SECONDS = ("seconds_p20", "seconds_median", "seconds_p80")


def shows(text: str, value: Any) -> bool:
    """A word, or a number which equals the digits shown: four; of a percentage one decimal, of a ratio two."""
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


def tables(runs: list[Row]) -> Cells:
    """The tables of a device."""
    made: Cells = {}
    newest = {tuple(case[each] for each in HEAD[:4]): case for case in runs[-1]["cases"]}
    for (group, name, way, kind), case in newest.items():
        weft = newest.get((group, name, "Weft", kind), {})
        for key, value in case.items() if case["status"] == "measured" else ():
            if key in (*HEAD, *SECONDS[::2]) or (key, kind) == ("timer", "host_time"):
                continue
            beside = way != "Weft" and key != "roofline" and not isinstance(value, str) and weft.get(key)
            small = [value / weft[key]] if beside else []
            if key == SECONDS[1]:
                small += _over(case, weft)[::2] if beside else []
                small += [case[each] for each in SECONDS[::2]] if SECONDS[0] in case else []
            text = TIMERS.get(value, value) if key == "timer" else value
            made[f"group {group} {kind}", name, _word(key, kind), way] = [text, *small]
    for at, run in enumerate(runs, 1):
        made["runs", str(at), "commit"] = [run["commit"][:10] + " with changes" * run["dirty"]]
        made["runs", str(at), "machine"] = [run.get("machine", {}).get("cpu", "not recorded")]
        for case in run["cases"] if len(runs) > 1 else ():
            key = tuple(case[each] for each in HEAD[:4])
            if SECONDS[0] in case and SECONDS[1] in newest.get(key, ()):
                heads = ("history", *key[:3], _word(SECONDS[1], key[3]), f"{run['time'][:10]} {run['commit'][:7]}")
                made[heads] = [case[each] for each in (SECONDS[1], *SECONDS[::2])]
    return made | dict(_changes(newest, runs))


def _word(key: str, kind: str) -> str:
    return WORDS.get(key, key.replace("_", " ")) if (key, kind) != (SECONDS[1], "host_time") else "host time"


def _over(case: Row, other: Row) -> list[float]:
    """The ratio of two times, with its spread: p20 over p80, median over median, p80 over p20."""
    ends = zip(SECONDS, SECONDS[::-1], strict=True)
    return [case.get(one, case[SECONDS[1]]) / other.get(two, other[SECONDS[1]]) for one, two in ends]


def _changes(newest: dict[tuple[str, ...], Row], runs: list[Row]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """The verdict on each of Weft's times: whether, for all baselines, the spreads now and before are disjoint."""
    machines = [[run.get("machine", {}).get(each) for each in ("cpu", "cores")] for run in runs]
    every = [
        {tuple(case[each] for each in HEAD[:4]): case for case in run["cases"] if SECONDS[1] in case} for run in runs
    ]
    for own, case in every[-1].items():
        alike = [
            at for at in range(len(runs) - 1) if own[3] == "time" or (machines[at] == machines[-1] != [None, None])
        ]
        before = [every[at] for at in alike[-5:] if own in every[at]]
        if own[2].replace(",", " ").split()[0] != "Weft" or not before:
            continue
        words = set()
        for other, base in every[-1].items():
            past = [cases for cases in before if other in cases]
            beside = (other[0], other[1], other[3]) == (own[0], own[1], own[3]) and not other[2].startswith("Weft")
            if beside and past:
                ends = zip(*(_over(cases[other], cases[own]) for cases in past), strict=True)
                (low, _, high), now = map(statistics.median, ends), _over(base, case)
                words.add("slower" if now[2] < low else "faster" if now[0] > high else "within the spread")
        word = words.pop() if len(words) == 1 else "within the spread" if words else "not judged"
        heads = ("changes", *own[:3], _word(SECONDS[1], own[3]))
        yield (*heads, "time before"), [statistics.median(cases[own][SECONDS[1]] for cases in before)]
        yield (*heads, "time now"), [case[SECONDS[1]]]
        yield (*heads, "verdict"), [word]


def shared(folder: Path) -> Cells:
    """Of what is the same on all devices, where it can be read."""
    found: Cells = {}
    for row in json.loads((folder / "reshard_bytes.json").read_text()):
        heads = ("engines", row["mesh"], " x ".join(map(str, row["shape"])), row["engine"])
        found |= {(*heads, "pairs"): [row["pairs"]], (*heads, "mean"): [row["mean"]], (*heads, "most"): [row["max"]]}
    for row in json.loads((folder / "predicted.json").read_text()):
        found |= {("predictions", row["row"], row["figure"], key): [row[key]] for key in ("predicted", "reported")}
    for name in ("seconds", "memory"):
        for row in json.loads((folder / f"predicted_{name}_here.json").read_text()):
            found |= {("measured", row["row"], row["figure"], key): [row[key]] for key in ("predicted", "measured")}
            ratio = row["predicted"] / row["measured"]
            found["measured", row["row"], row["figure"], "predicted / measured"] = [ratio]
    for row in json.loads((folder / "aot/triton-3.7.1.json").read_text()):
        for word, key in (("registers", "registers"), ("spilt", "spill_bytes"), ("shared", "shared_bytes")):
            found["compiled", row["variant"], f"{row['target']} {word}"] = [row[key]]
    return found
