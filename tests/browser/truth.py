"""The page's numbers, worked out from the JSON alone: no code of the page or of the benchmarks is used here."""

from __future__ import annotations

import json
import math
import re
import statistics
from itertools import pairwise
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


def timed_alike(runs: list[Row], kind: str) -> list[Row]:
    """Of the runs before the newest the last five on its machine, of which a time of a host is; a kernel's is of the GPU."""
    newest = runs[-1].get("machine", {})
    same = [run for run in runs[:-1] if kind == "time" or (newest and _model(run) == _model(runs[-1]))]
    return same[-5:]


def _model(run: Row) -> list[Any]:
    return [run.get("machine", {}).get(key) for key in ("cpu", "cores")]


def _ours(way: str) -> bool:
    return way.replace(",", " ").split()[0] == "Weft"


def check_lines(lines: list[Row], title: str, runs: list[Row]) -> None:
    """What changed stands there, each figure once, the worst first, the compiler's apart, and its name leads to its history."""
    wanted = {} if len(runs) == 1 else {**_changed_times(runs), **_changed_counts(runs)}
    shown = {(line["name"], line["of"]) for line in lines}
    assert shown <= {key[1:] for key in wanted}
    left_out = [(before, now) for key, (before, now, _) in wanted.items() if key[1:] not in shown]
    assert all(math.isclose(before, now, rel_tol=1e-2) for before, now in left_out), "but for what reads the same"
    growths: dict[tuple[bool, bool], list[float]] = {}
    broken = [line["broken"] for line in lines]
    assert broken == sorted(broken, reverse=True), "what breaks a budget comes first"
    for line in lines:
        (key,) = (key for key in wanted if key[1:] == (line["name"], line["of"]))
        before, now, others = wanted[key]
        told = line["from"].split(" → ")
        assert all(_is(text, value) for text, value in zip(told, (before, now), strict=True)), line
        growth = now / before if before else math.inf
        if before:
            check(line["growth"], growth)
        else:
            assert line["growth"] == "from 0"
        timed = key[0] != "compiled" and line["of"].endswith("time")
        assert line["word"] == (("slower" if timed else "more") if now > before else ("faster" if timed else "less"))
        assert line["link"]
        if others:
            check(line["others"].removeprefix("others "), statistics.geometric_mean(others))
        growths.setdefault((key[0] == "compiled", line["broken"]), []).append(growth)
    assert all(worse >= better - 1e-4 for each in growths.values() for worse, better in pairwise(each))
    times = [each for each in lines if each["word"] in ("slower", "faster")]
    slower = sum(each["word"] == "slower" for each in times)
    if times:
        assert f": {slower or 'none'} of " in title and f" {len(times) - slower or 'none'} faster" in title


def _is(text: str, value: float) -> bool:
    """A figure without a unit has three digits."""
    return shows(text, value) if " " in text else math.isclose(float(text), value, rel_tol=5.1e-3)


def _changed_times(runs: list[Row]) -> dict[tuple[str, str, str], tuple[float, float, list[float]]]:
    found = {}
    newest = runs[-1]
    growth: dict[tuple[str, str, str, str], tuple[float, float, float, float]] = {}
    for case in (case for case in newest["cases"] if "seconds_median" in case and case["status"] == "measured"):
        key = [case[each] for each in HEAD[:4]]
        old = [
            each
            for run in timed_alike(runs, case["kind"])
            for each in run["cases"]
            if [each[name] for name in HEAD[:4]] == key and "seconds_median" in each
        ]
        if old:
            p20, median, p80 = (
                statistics.median(each[name] for each in old)
                for name in ("seconds_p20", "seconds_median", "seconds_p80")
            )
            growth[tuple(key)] = (median, case["seconds_median"], p20 / case["seconds_p80"], p80 / case["seconds_p20"])
    for (group, name, way, kind), (before, now, low, high) in growth.items():
        if _ours(way) and not low <= 1 <= high:
            others = [
                each[1] / each[0]
                for (its_group, its_name, its_way, its_kind), each in growth.items()
                if (its_group, its_name, its_kind) == (group, name, kind) and not _ours(its_way)
            ]
            found[group, name, f"{way}, {'time' if kind == 'time' else 'host time'}"] = (before, now, others)
    return found


def _changed_counts(runs: list[Row]) -> dict[tuple[str, str, str], tuple[float, float, list[float]]]:
    found = {}
    words = {figure: word for word, figure in WORDS.items() if figure != "seconds_median"}
    before = {
        tuple(case[each] for each in HEAD[:3]): case
        for run in runs[:-1]
        for case in run["cases"]
        if case["status"] == "measured"
    }
    for case in (case for case in runs[-1]["cases"] if case["status"] == "measured" and _ours(case["way"])):
        old = before.get(tuple(case[each] for each in HEAD[:3]), {})
        for figure, value in case.items():
            counted = case["kind"] == "count" or figure in ("collectives", "peak_bytes")
            number = isinstance(value, int | float) and isinstance(old.get(figure), int | float)
            if counted and number and not re.fullmatch(r".+_\d{3}", figure) and old[figure] != value:
                label = words.get(figure, figure.replace("_", " "))
                found[case["group"], case["name"], f"{case['way']}, {label}"] = (old[figure], value, [])
    return found


def check_changes(tables: list[Row], runs: list[Row]) -> None:
    kinds = {case["kind"] for case in runs[-1]["cases"] if "seconds_median" in case}
    assert len(tables) == any(timed_alike(runs, kind) for kind in kinds)
    for table in tables:
        for row in table["rows"]:
            newest_case = _timed(runs[-1], row)
            assert newest_case is not None
            some = [*timed_alike(runs, newest_case["kind"]), runs[-1]]
            of_runs = [case for run in some if (case := _timed(run, row)) is not None]
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


def check_runs(tables: list[Row], runs: list[Row]) -> None:
    """Each run, the newest first, with its machine and versions."""
    (table,) = tables
    for number, told in zip(range(len(runs), 0, -1), table["rows"], strict=True):
        run = runs[number - 1]
        machine = run.get("machine", {})
        shown = dict(zip(table["head"][1:], (text for text, _ in told["cells"]), strict=True))
        assert told["heads"] == [str(number)]
        assert shown["machine"] == machine.get("cpu", "not recorded")
        assert [shown["cores"], shown["load"]] == [str(machine.get(name, "")) for name in ("cores", "load")]
        assert all(shown[name] == version for name, version in run["versions"].items())
        assert shown["commit"].startswith(run["commit"][:10])
        assert int(shown["measured"]) == sum(case["status"] == "measured" for case in run["cases"])


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
