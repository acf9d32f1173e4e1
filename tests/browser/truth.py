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
NUMBER = re.compile(r"(-?[\d.]+(?:e[+-]?\d+)?)(%|×)?(?: ([TGMkmµn]?)(?:s|B|B/s|flop|flop/s)?)?")
WORDS = {
    "time": "seconds_median",
    "host time": "seconds_median",
    "share of the roofline": "roofline",
    "memory above inputs and gradients": "peak_bytes",
    "memory of the gradients": "gradient_bytes",
    "bytes gathered a token": "gathered_bytes_a_token",
    "bytes over the bound, mean": "bytes_over_bound_mean",
    "bytes over the bound, most": "bytes_over_bound_max",
    "share of pairs above the bound": "share_above_bound",
    "pairs that need nothing, yet receive": "unneeded",
}
Row = dict[str, Any]
TIMERS = {"events": "CUDA events", "graph": "CUDA graph, replayed"}
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
    told = NUMBER.fullmatch(text)
    assert told, f"{text!r} is no number"
    return float(told[1]) * (0.01 if told[2] == "%" else 1) * PREFIXES[told[3] or ""]


def shows(text: str, value: float) -> bool:
    """Equal to the digits that are shown: four, or one after the point of a percentage, or two of a ratio."""
    slack = 5.1e-4 if text.endswith("%") else max(5.1e-4 * abs(value), 0.00501 if text.endswith("×") else 0)
    return math.isclose(number(text), value, rel_tol=0, abs_tol=slack)


def check(text: str, value: float) -> None:
    assert shows(text, value), (text, value)


def check_groups(tables: list[Row], run: Row) -> None:
    """Each cell is its case's, and each number of each case has its cell."""
    cases = {(case["group"], case["name"], case["way"]): case for case in run["cases"]}
    seen = set()
    for table in tables:
        group = table["name"].removeprefix("group ")
        for row in table["rows"]:
            name, figure = row["heads"]
            if figure == "host time over Weft's":
                _check_means(row, table["head"][2:], [case for case in run["cases"] if case["group"] == group])
                continue
            for way, (text, detail) in zip(table["head"][2:], row["cells"], strict=True):
                case = cases.get((group, name, way))
                if case and case["status"] != "measured":
                    assert text.startswith(case["status"]) and str(case.get("error", "")) in text
                    seen.add((group, name, way, case["status"]))
                elif text:
                    assert case is not None
                    key = WORDS.get(figure) or next(key for key in case if key.replace("_", " ") == figure)
                    seen.add((group, name, way, key))
                    if isinstance(case[key], str):
                        assert text == (TIMERS[case[key]] if key == "timer" else case[key])
                        continue
                    check(text, case[key])
                    weft = cases.get((group, name, "Weft"), {})
                    if way != "Weft" and weft.get(key) and case[key] / weft[key] > 0 and key != "roofline":
                        _check_over(detail, case, weft, key)
    wanted = {
        (*key, figure)
        for key, case in cases.items()
        for figure in [each for each in case if each not in (*HEAD, "seconds_p20", "seconds_p80")]
        if case["status"] == "measured" and (figure, case["kind"]) != ("timer", "host_time")
    }
    assert seen == wanted | {(*key, case["status"]) for key, case in cases.items() if case["status"] != "measured"}


def _check_over(detail: str, case: Row, weft: Row, key: str) -> None:
    """The ratio to Weft's; of a time with its noise."""
    ratio, *rest = detail.split(", ")
    check(ratio, case[key] / weft[key])
    if key == "seconds_median":
        low, _, high = rest[0].partition(" to ")
        check(low, case.get("seconds_p20", case[key]) / weft.get("seconds_p80", weft[key]))
        check(high, case.get("seconds_p80", case[key]) / weft.get("seconds_p20", weft[key]))


def _check_means(row: Row, ways: list[str], cases: list[Row]) -> None:
    """The last row of host times: of each baseline the geometric mean of its ratios."""
    times = {(case["name"], case["way"]): case["seconds_median"] for case in cases if case["kind"] == "host_time"}
    compared = [name for name, way in times if way == "Weft"]
    assert row["heads"][0] == f"geometric mean of {len(compared)} cases"
    for way, (text, _) in zip(ways, row["cells"], strict=True):
        ratios = [times[name, way] / times[name, "Weft"] for name in compared if (name, way) in times]
        if way.startswith("Weft") or not ratios:
            assert text == ""
        else:
            check(text, statistics.geometric_mean(ratios))


def check_history(tables: list[Row], runs: list[Row]) -> None:
    assert len(tables) == (len(runs) > 1 and any("seconds_median" in case for case in runs[-1]["cases"]))
    for table in tables:
        assert len(table["head"]) == 4 + len(runs)
        timed = [case for case in runs[-1]["cases"] if "seconds_median" in case]
        assert len(table["rows"]) == len(timed)
        for row in table["rows"]:
            for run, (text, detail) in zip(runs, row["cells"], strict=True):
                case = _timed(run, row)
                if case is None:
                    assert (text, detail) == ("not timed", "")
                    continue
                check(text, case["seconds_median"])
                if "seconds_p20" not in case:
                    assert detail == ""
                    continue
                low, _, high = detail.partition(" to ")
                check(low, case["seconds_p20"])
                check(high, case["seconds_p80"])


def _timed(run: Row, row: Row) -> Row | None:
    """The case that a row's first three heads name; None where the run has no time of it."""
    return next(
        (
            case
            for case in run["cases"]
            if [case["group"], case["name"], case["way"]] == row["heads"][:3] and "seconds_median" in case
        ),
        None,
    )


def check_changes(tables: list[Row], runs: list[Row]) -> None:
    assert len(tables) == (len(runs) > 1)
    for table in tables:
        for row in table["rows"]:
            of_runs = [case for run in runs[-6:] if (case := _timed(run, row)) is not None]
            assert CLOCKS[of_runs[-1]["kind"]] == row["heads"][3]
            (before, _), (now, _), (ratio, noise), (word, _) = row["cells"]
            median, low, high = (
                statistics.median(case.get(key, case["seconds_median"]) for case in of_runs[:-1])
                for key in ("seconds_median", "seconds_p20", "seconds_p80")
            )
            newest = of_runs[-1]
            check(before, median)
            check(now, newest["seconds_median"])
            check(f"{ratio}×", median / newest["seconds_median"])
            own = [newest.get(key, newest["seconds_median"]) for key in ("seconds_p80", "seconds_p20")]
            ends = low / own[0], high / own[1]
            for told, end in zip(noise.split(" to "), ends, strict=True):
                check(f"{told}×", end)
            assert word == ("faster" if ends[0] > 1 else "slower" if ends[1] < 1 else "within the noise")


def check_shared(tables: list[Row], folder: Path) -> None:
    by_name = {table["name"]: table for table in tables}
    assert set(by_name) <= {"engines", "ratios", "compiled"}
    if "engines" in by_name:
        rows = json.loads((folder / "reshard_bytes.json").read_text())
        for told, row in zip(by_name["engines"]["rows"], rows, strict=True):
            assert told["heads"] == [row["mesh"], " x ".join(map(str, row["shape"])), row["engine"]]
            (pairs, _), (mean, _), (most, _) = told["cells"]
            assert pairs == str(row["pairs"])
            check(mean, row["mean"])
            check(most, row["max"])
        ratios = iter(by_name["ratios"]["rows"])
        for row in rows:
            for ratio, count in row["ratios"].items():
                told = next(ratios)
                assert told["heads"] == [row["mesh"], " x ".join(map(str, row["shape"])), row["engine"]]
                (its, _), (pairs, _), (share, _) = told["cells"]
                assert pairs == str(count)
                check(its, float(ratio))
                check(share, count / sum(row["ratios"].values()))
        assert next(ratios, None) is None
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
