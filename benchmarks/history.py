"""The history of benchmark results: a folder for each device, a file for each run.

    python -m benchmarks.history add FILE [--device NAME] [--commit ID]

reads FILE, written by `./run benchmark --benchmark-json FILE`. The command writes a `record.Run` as
results/<device>/<UTC time>_<short commit>.json, and renews index.json in the same folder: the list of runs, oldest
first. The record has from each benchmark in pytest-benchmark's JSON

    name    extra_info["case"], or the test's name without "test_" and without the id of the way
    group   its group, or the name of its file without "test_"
    way, kind, status    extra_info's, or "Weft", "host_time" and "measured"

and each further word and number of extra_info under its own key. A host_time without seconds_median gets
pytest-benchmark's median. Device, machine, versions and ceilings come from machine_info, and from the extra_info of a
benchmark named "ceilings": there "device", "commit" and "dirty" describe the run, other words are versions, and other
numbers are ceilings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.record import STATUSES, TIME, Case, HistoryError, Run, folder_name, json_of, naming, read, taken

__all__ = ["Case", "History", "HistoryError", "Run", "add", "devices", "load", "read", "recorded", "runs"]

RESULTS = Path(__file__).parent / "results"
RUN_FILES = "[0-9]*T[0-9]*Z_*.json"  # of runs, beside the index.json of a device
OF_A_CASE = {"case", "way", "kind", "status", "error", "configuration"}  # words of a benchmark which are not versions


@dataclass(frozen=True, slots=True)
class History:
    """The runs of a device by file name, oldest first, and a line for each unreadable file."""

    runs: Mapping[str, Run]
    unreadable: tuple[str, ...]


def runs(device: str, results: Path = RESULTS) -> History:
    """The history of a device: all readable runs."""
    folder = results / folder_name(device)
    found: dict[str, Run] = {}
    unreadable = []
    for file in sorted(folder.glob(RUN_FILES)):  # by time, with which names begin
        try:
            run = read(file)
            if folder_name(run.device) != folder.name:
                raise HistoryError(f"{file}: it is of device {run.device!r}; move it to {folder_name(run.device)}/")
            found[file.name] = run
        except HistoryError as error:
            unreadable.append(str(error))
    return History(found, tuple(unreadable))


def devices(results: Path = RESULTS) -> list[str]:
    """The names of folders with runs."""
    return sorted({file.parent.name for file in results.glob(f"*/{RUN_FILES}")})


def recorded(file: Path, device: str | None = None, commit: str | None = None) -> Run:
    """The run in a JSON file of pytest-benchmark.

    device, commit: for a file without device or commit, as from a copy without repository. Raises HistoryError.
    """
    with naming(file, "correct --device, --commit or what the benchmarks put into extra_info, and run them again"):
        raw = json_of(file)
        machine, told = taken(raw, "machine_info", dict), taken(raw, "commit_info", dict)
        cases: list[Case] = []
        said: dict[str, Any] = {}
        for benchmark in taken(raw, "benchmarks", list):
            extra = taken(benchmark, "extra_info", dict)
            if taken(benchmark, "name", str).removeprefix("test_") == "ceilings":
                said |= {key: value for key, value in extra.items() if key not in OF_A_CASE}
            else:
                cases.append(case_of(benchmark))
        said = {"commit": told.get("id", ""), "dirty": told.get("dirty", False)} | said
        asked = [
            device,
            machine.get("device"),
            said.pop("device", None),
            *(each.figures.get("device") for each in cases),
        ]
        names = [name for name in asked if name is not None]
        if not names or any(name != names[0] for name in names):
            told = " and ".join(sorted(set(map(repr, names)))) or "none; --device cpu would name one"
            raise ValueError(f"a run is of one device, and this one names {told}")
        made = datetime.fromisoformat(taken(raw, "datetime", str))
        # Missing in files of older versions of pytest-benchmark.
        made = made if made.tzinfo else made.replace(tzinfo=UTC)
        machine = {"python_version": "", "versions": {}, "ceilings": {}, "machine": {}} | machine
        versions = {"python": machine["python_version"]} | taken(machine, "versions", dict)
        return Run(
            device=names[0],
            time=made.astimezone(UTC).strftime(TIME),
            commit=_commit(said.pop("commit"), commit),
            dirty=bool(said.pop("dirty")),
            versions=versions | {key: value for key, value in said.items() if isinstance(value, str)},
            ceilings=taken(machine, "ceilings", dict) | {key: v for key, v in said.items() if not isinstance(v, str)},
            machine=taken(machine, "machine", dict),
            cases=tuple(cases),
        )


def _commit(told: str, asked: str | None) -> str:
    """The commit of a run. Raises ValueError if `asked` differs."""
    if told in ("", "unversioned"):  # pytest-benchmark's word
        return asked or ""
    if asked and not str(told).startswith(asked):
        raise ValueError(f"the run is of commit {told}, not {asked}")
    return told


def load(file: Path) -> Run:
    """The run in a file of the history or in pytest-benchmark's. Raises HistoryError."""
    with naming(file, "give a run of benchmarks/results, or what --benchmark-json wrote"):
        of_pytest = "benchmarks" in json_of(file)
    return recorded(file) if of_pytest else read(file)


def add(file: Path, device: str | None = None, results: Path = RESULTS, commit: str | None = None) -> Path:
    """Add the run in a JSON file of pytest-benchmark; a second call adds nothing. Raises HistoryError."""
    run = recorded(file, device, commit)
    path = run.write(results / folder_name(run.device))
    rows = [json.dumps(_index_row(name, each)) for name, each in runs(run.device, results).runs.items()]
    path.with_name("index.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")
    return path


def case_of(benchmark: Mapping[str, Any]) -> Case:
    """The case in a record of pytest-benchmark, by the rules in the module's docstring. Raises ValueError."""
    extra = dict(benchmark["extra_info"])
    way, kind, status = extra.pop("way", "Weft"), extra.pop("kind", "host_time"), extra.pop("status", "measured")
    name, _, ids = benchmark["name"].removeprefix("test_").partition("[")
    ids = f"-{ids.removesuffix(']')}-".replace(f"-{way}-", "-", 1).strip("-")
    group = benchmark.get("group") or Path(taken(benchmark, "fullname", str).partition("::")[0]).stem
    if kind == "host_time" and status == "measured" and "seconds_median" not in extra:
        extra |= _by_its_clock(taken(benchmark, "stats", dict))
    return Case(
        name=extra.pop("case", f"{name}[{ids}]" if ids else name),
        group=group.removeprefix("test_"),
        way=way,
        kind=kind,
        status=status,
        figures=extra,
    )


def _by_its_clock(stats: Mapping[str, Any]) -> dict[str, float]:
    """pytest-benchmark's own median, and percentiles if the file has the seconds of each round."""
    seconds: dict[str, float] = {"seconds_median": taken(stats, "median", float)}
    if len(stats.get("data", ())) > 1:
        fifths = statistics.quantiles(stats["data"], n=5, method="inclusive")
        seconds |= {"seconds_p20": fifths[0], "seconds_p80": fifths[3]}
    return seconds


def _index_row(name: str, run: Run) -> dict[str, Any]:
    statuses = Counter(case.status for case in run.cases)
    head = {"file": name, "time": run.time, "commit": run.commit, "dirty": run.dirty}
    return head | {status: statuses[status] for status in STATUSES}


def main(arguments: Sequence[str] | None = None, results: Path = RESULTS) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history", description="The history of the benchmarks.")
    adding = parser.add_subparsers(required=True, metavar="add").add_parser("add", help="add a run")
    adding.add_argument("file", type=Path, help="what `./run benchmark --benchmark-json FILE` wrote")
    adding.add_argument("--device", help='what the run is of, where the file does not say: "cpu", or a GPU\'s name')
    adding.add_argument("--commit", help="what the run is of, where it was made without a repository")
    options = parser.parse_args(arguments)
    try:
        path = add(options.file, options.device, results, options.commit)
    except HistoryError as error:
        sys.exit(f"benchmarks.history: {error}")
    print(path)
    for line in runs(path.parent.name, results).unreadable:
        print(f"not read: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
