"""The page's numbers, worked out from the JSON alone: no code of the page or of the benchmarks is used here."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

HEAD = ("group", "name", "way", "kind", "status")
PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}
WORDS = {
    "time": "seconds_median",
    "host time": "seconds_median",
    "share of the roofline": "roofline",
    "memory held": "peak_bytes",
    "memory of the gradients": "gradient_bytes",
    "bytes gathered a token": "gathered_bytes_a_token",
    "bytes over the bound, mean": "bytes_over_bound_mean",
    "bytes over the bound, most": "bytes_over_bound_max",
    "share of pairs above the bound": "share_above_bound",
    "pairs that need nothing, yet receive": "unneeded",
}
Row = dict[str, Any]
CLOCKS = {"time": "time", "host_time": "host time"}


def runs_by_device(folder: Path) -> list[list[Row]]:
    """The runs that can be read, oldest first; a GPU's before a CPU's."""
    found: dict[str, list[Row]] = {}
    for file in sorted(folder.glob("*/2*Z_*.json")):
        try:
            run = json.loads(file.read_text())
        except ValueError:
            continue
        if isinstance(run, dict) and run.get("schema") == 1 and "A100" not in run["device"]:
            found.setdefault(run["device"], []).append(run)
    return [found[device] for device in sorted(found, key=lambda device: (device == "cpu", device))]


def raw_file(folder: Path, name: str) -> Path:
    return folder / name.replace("NVIDIA H200", "NVIDIA-H200")


def number(text: str) -> float:
    """The number that is shown: "1.5 ms" is 0.0015, "91.0%" is 0.91."""
    told = re.fullmatch(r"(-?[\d.]+(?:e[+-]?\d+)?)(%|×)?(?: ([TGMkmµn]?)[sB])?", text)
    assert told, f"{text!r} is no number"
    return float(told[1]) * (0.01 if told[2] == "%" else 1) * PREFIXES[told[3] or ""]


def check(text: str, value: float) -> None:
    """Equal to the digits that are shown: four, or one after the point of a percentage, or two of a ratio."""
    slack = 5.1e-4 if text.endswith("%") else max(5.1e-4 * abs(value), 0.00501 if text.endswith("×") else 0)
    assert math.isclose(number(text), value, rel_tol=0, abs_tol=slack), (text, value)


def check_groups(tables: list[Row], run: Row) -> None:
    """Each cell is its case's, and each number of each case has its cell."""
    cases = {(case["group"], case["name"], case["way"]): case for case in run["cases"]}
    seen = set()
    for table in tables:
        group = table["name"].removeprefix("group ")
        for row in table["rows"]:
            name, figure = row["heads"]
            for way, (text, detail) in zip(table["head"][2:], row["cells"], strict=True):
                case = cases.get((group, name, way))
                if case and case["status"] != "measured":
                    assert text.startswith(case["status"]) and str(case.get("error", "")) in text
                    seen.add((group, name, way, case["status"]))
                elif text:
                    assert case is not None
                    key = WORDS.get(figure) or next(key for key in case if key.replace("_", " ") == figure)
                    check(text, case[key])
                    seen.add((group, name, way, key))
                    weft = cases.get((group, name, "Weft"), {}).get(key)
                    if way != "Weft" and weft and case[key] / weft > 0 and key != "roofline":
                        check(detail.partition(",")[0], case[key] / weft)
    wanted = {
        (*key, figure)
        for key, case in cases.items()
        for figure in [each for each in case if each not in (*HEAD, "seconds_p20", "seconds_p80")]
        if case["status"] == "measured" and not isinstance(case[figure], str)
    }
    assert seen == wanted | {(*key, case["status"]) for key, case in cases.items() if case["status"] != "measured"}


def check_history(tables: list[Row], runs: list[Row]) -> None:
    assert len(tables) == (len(runs) > 1 and any("seconds_median" in case for case in runs[-1]["cases"]))
    for table in tables:
        assert len(table["head"]) == 4 + len(runs)
        timed = [case for case in runs[-1]["cases"] if "seconds_median" in case]
        assert len(table["rows"]) == len(timed)
        for row in table["rows"]:
            for run, (text, detail) in zip(runs, row["cells"], strict=True):
                (case,) = (
                    case for case in run["cases"] if [case["group"], case["name"], case["way"]] == row["heads"][:3]
                )
                check(text, case["seconds_median"])
                low, _, high = detail.partition(" to ")
                check(low, case["seconds_p20"])
                check(high, case["seconds_p80"])


def check_changes(tables: list[Row], runs: list[Row]) -> None:
    assert len(tables) == (len(runs) > 1)
    for table in tables:
        for row in table["rows"]:
            of_runs = [
                next(case for case in run["cases"] if [case["group"], case["name"], case["way"]] == row["heads"][:3])
                for run in runs[-6:]
            ]
            assert CLOCKS[of_runs[-1]["kind"]] == row["heads"][3]
            (before, _), (now, _), (ratio, noise), (word, _) = row["cells"]
            median, low, high = (
                statistics.median(case[key] for case in of_runs[:-1])
                for key in ("seconds_median", "seconds_p20", "seconds_p80")
            )
            newest = of_runs[-1]
            check(before, median)
            check(now, newest["seconds_median"])
            check(f"{ratio}×", median / newest["seconds_median"])
            ends = low / newest["seconds_p80"], high / newest["seconds_p20"]
            for told, end in zip(noise.split(" to "), ends, strict=True):
                check(f"{told}×", end)
            assert word == ("faster" if ends[0] > 1 else "slower" if ends[1] < 1 else "within the noise")


def check_shared(tables: list[Row], folder: Path) -> None:
    by_name = {table["name"]: table for table in tables}
    assert set(by_name) <= {"engines", "compiled"}
    if "engines" in by_name:
        rows = json.loads((folder / "reshard_bytes.json").read_text())
        for told, row in zip(by_name["engines"]["rows"], rows, strict=True):
            assert told["heads"] == [row["mesh"], " x ".join(map(str, row["shape"])), row["engine"]]
            assert [cell[0] for cell in told["cells"]] == [str(row["pairs"]), f"{row['mean']:.2f}", f"{row['max']:.3g}"]
    if "compiled" in by_name:
        rows = json.loads((folder / "aot/triton-3.7.1.json").read_text())
        cells = iter([cell[0] for told in by_name["compiled"]["rows"] for cell in told["cells"]])
        for row in rows:  # four targets a variant, four figures a target
            assert next(cells) == str(row["registers"])
            check(next(cells), row["spill_bytes"])
            check(next(cells), row["shared_bytes"])
            widest = [
                max((int(key.split()[1]) for key in row["accesses"] if key.startswith(verb)), default=None)
                for verb in ("load", "store")
            ]
            assert next(cells) == " / ".join(str(each or "none") for each in widest)
        assert next(cells, None) is None


def tiles(run: Row) -> list[str]:
    """Their figures, of the runs that the tests make."""
    measured = [case for case in run["cases"] if case["status"] == "measured"]
    timed = [case for case in measured if case["kind"] == "time"]
    counted = [case for case in measured if case["kind"] == "count"]
    own = {(case["group"], case["name"]): case for case in timed if case["way"] == "Weft"}
    found: list[str] = []
    shares = [round(case["roofline"] * 100) for case in own.values() if "roofline" in case]
    if shares:
        found.append(f"{min(shares)}–{max(shares)}%" if min(shares) < max(shares) else f"{min(shares)}%")
    rivals: dict[str, list[float]] = {}
    for case in timed:
        weft = own.get((case["group"], case["name"]))
        measure = weft is not None and "roofline" in weft and "roofline" not in case
        if weft and not case["way"].startswith("Weft") and not case["way"].endswith("again") and not measure:
            rivals.setdefault(case["way"], []).append(case["seconds_median"] / weft["seconds_median"])
    if rivals:
        means = {way: math.prod(each) ** (1 / len(each)) for way, each in rivals.items()}
        found.append(f"{means.get('eager torch', max(means.values())):.2f}×")
    for some in (timed, counted):
        if some is counted:
            most = [
                case["bytes_over_bound_max"]
                for case in counted
                if case["way"] == "Weft" and "bytes_over_bound_max" in case
            ]
            found += [f"{max(most):.2f}×"] if most else []
            logits = [
                case["bytes_a_logit"] for case in counted if case["way"].startswith("Weft") and "bytes_a_logit" in case
            ]
            found += [f"{max(logits):.2f} B"] if logits else []
        held = {(case["name"], case["way"]): case["peak_bytes"] for case in some if case.get("peak_bytes")}
        ratios = {
            name: held[name, "eager torch"] / held[name, "Weft"]
            for name, way in held
            if way == "eager torch" and (name, "Weft") in held
        }
        if ratios:
            found.append(f"{held[max(ratios, key=lambda name: ratios[name]), 'Weft'] / 1e9:.3g} GB")
    found += [str(case["collectives"]) for case in measured if case["way"] == "Weft" and "collectives" in case]
    return found[:4]
