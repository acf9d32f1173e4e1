"""A run of the benchmarks, as a value and as a file.

A run file is JSON with device, versions and a line for each case, sorted by group, name and way. Every number is in SI
units.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

SCHEMA = 1
TIME = "%Y-%m-%dT%H:%M:%SZ"
KINDS = ("time", "host_time", "count")  # time of a kernel on a GPU; time of a CPU; counted, not timed
STATUSES = ("measured", "absent", "failed")
POINT = re.compile(r"(.+)_(\d{3})")  # the name of a point of a curve

Figure = str | int | float


class HistoryError(ValueError):
    """A file is no run, or runs cannot be compared. The message has file or runs, the problem and the remedy."""


def ours(way: str) -> bool:
    """Whether a way is Weft, or a form of Weft."""
    return way == "Weft" or way.startswith(("Weft,", "Weft "))


@dataclass(frozen=True, slots=True)
class Spread:
    """A time in seconds, or a ratio of two times: the median, and the 20th and the 80th percentile."""

    p20: float
    median: float
    p80: float

    @property
    def ends(self) -> tuple[float, float]:
        return self.p20, self.p80

    def over(self, other: Spread) -> Spread:
        """The ratio self / other: the least is p20 / p80, the greatest p80 / p20."""
        return Spread(self.p20 / other.p80, self.median / other.median, self.p80 / other.p20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A computation in a way, with the figures measured.

    group, name: of the computation.
    way: "Weft", a form of Weft ("Weft, one shard", "Weft zero=2"), or the name of a baseline.
    kind: "time" of a kernel on a GPU, "host_time" of a CPU, or "count".  status: "measured", "absent" or "failed".
    figures: numbers in SI units, and words.
    Raises ValueError for a figure of a further type, and for a measured time without seconds_median.
    """

    name: str
    group: str
    way: str
    kind: str
    status: str
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        words = {each.name: getattr(self, each.name) for each in fields(self)[:-1]}
        for key, value in words.items():
            if not isinstance(value, str) or not value:
                raise ValueError(f"{key!r} of a case is {value!r:.60}, and a word is wanted: {words!r:.200}")
        if self.kind not in KINDS or self.status not in STATUSES:
            known = f"kinds are {', '.join(KINDS)}, statuses {', '.join(STATUSES)}"
            raise ValueError(f"{self.title} is of kind {self.kind!r} and status {self.status!r}; {known}")
        _check_figures(self.title, self.figures)
        if doubled := words.keys() & self.figures.keys():
            raise ValueError(f"{self.title} has a figure named {sorted(doubled)}, which a case has already; rename it")
        if self.timed:
            _check_seconds(self.title, [self.figures.get(f"seconds_{which}") for which in ("p20", "median", "p80")])

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for the same case in all runs."""
        return self.group, self.name, self.way

    @property
    def title(self) -> str:
        return printable(f"{self.group}: {self.name}, {self.way}")

    @property
    def ours(self) -> bool:
        return ours(self.way)

    @property
    def outcome(self) -> str:
        """The status; with the error if the case failed."""
        if self.status != "failed":
            return self.status
        return printable(f"failed: {self.figures.get('error', 'no error was told')}")

    @property
    def timed(self) -> bool:
        return self.status == "measured" and self.kind != "count"

    @property
    def seconds(self) -> Spread:
        """The time of a timed case. Missing percentiles are the median."""
        numbers = self.numbers
        median = numbers["seconds_median"]
        return Spread(numbers.get("seconds_p20", median), median, numbers.get("seconds_p80", median))

    @property
    def numbers(self) -> dict[str, int | float]:
        """The numbers by name, without points of curves. True and false count as words."""
        return {key: value for key, value in self.all_numbers() if not POINT.fullmatch(key)}

    @property
    def curves(self) -> dict[str, dict[int, float]]:
        """The points of each curve, by number: the figures "step_001" and "step_002" are points 1 and 2 of "step"."""
        found: dict[str, dict[int, float]] = {}
        for key, value in sorted(self.all_numbers()):
            if point := POINT.fullmatch(key):
                found.setdefault(point[1], {})[int(point[2])] = value
        return found

    def all_numbers(self) -> list[tuple[str, int | float]]:
        """All numbers with their names, points of curves included."""
        return [(key, value) for key, value in self.figures.items() if not isinstance(value, str | bool)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Cases measured together, on the same device, commit and time (UTC).

    versions: of python, torch, triton, weft, ….  ceilings: the device's peak rates, in SI units.
    machine: "cpu", the model; "cores" available to the run; "load" of the minute before the run. Empty if not recorded.
    Raises ValueError for cases of several devices, for a case given twice, and for a kernel's time on a CPU.
    """

    device: str
    time: str
    commit: str
    dirty: bool
    versions: Mapping[str, str]
    ceilings: Mapping[str, int | float]
    machine: Mapping[str, Figure] = field(default_factory=dict)
    cases: tuple[Case, ...]

    def __post_init__(self) -> None:
        folder_name(self.device)
        datetime.strptime(self.time, TIME)
        _check_figures("the run's ceilings", self.ceilings)
        _check_figures("the run's machine", self.machine)
        for name, word in {"commit": self.commit, **self.versions}.items():
            if not isinstance(word, str):
                raise ValueError(f"{name!r} of the run is {word!r:.60}, and a word is wanted")
        if not self.cases:
            raise ValueError("there is no case in it")
        object.__setattr__(self, "cases", tuple(sorted(self.cases, key=lambda case: case.key)))
        for case, following in itertools.pairwise(self.cases):
            if case.key == following.key:
                raise ValueError(f'{case.title} is there twice; extra_info["case"] can tell them apart')
        for case in self.cases:
            if case.figures.get("device", self.device) != self.device:
                raise ValueError(f"it mixes devices: {self.device!r}, and {case.figures['device']!r} in {case.title}")
            if case.kind == "time" and self.on_cpu:
                raise ValueError(f"{case.title} is a kernel's time, of a CPU; a CPU's is of kind 'host_time'")

    def clock(self, kind: str) -> tuple[Figure, ...] | None:
        """The GPU or CPU behind times of this kind, None if not recorded. Runs with equal clocks alone are compared."""
        if kind == "time":
            return (self.device,)
        return (self.machine["cpu"], self.machine["cores"]) if {"cpu", "cores"} <= self.machine.keys() else None

    @property
    def where(self) -> str:
        """The machine in words."""
        if self.clock("host_time") is None:
            return "a machine that was not recorded"
        load = f", load {self.machine['load']}" if "load" in self.machine else ""
        return printable(f"{self.machine['cpu']}, {self.machine['cores']} cores{load}")

    @property
    def on_cpu(self) -> bool:
        return self.device.casefold() == "cpu"

    def text(self) -> str:
        """The content of the run's file."""
        head = {"schema": SCHEMA, **{each.name: getattr(self, each.name) for each in fields(self)[:-1]}}
        if not self.machine:  # as in older files, from before runs recorded the machine
            del head["machine"]
        lines = [f" {json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in head.items()]
        cases = [f"  {json.dumps(_flat(case))}" for case in self.cases]
        return "{\n" + ",\n".join(lines) + ',\n "cases": [\n' + ",\n".join(cases) + "\n ]\n}\n"

    def write(self, folder: Path) -> Path:
        """Write the run in `folder`, named by time and commit, with a number if the name is taken; returns the path."""
        folder.mkdir(parents=True, exist_ok=True)
        commit = re.sub("[^0-9A-Za-z]", "", self.commit)[:10] or "unversioned"
        stem = f"{re.sub('[-:]', '', self.time)}_{commit}"
        for number in itertools.count(1):
            file = folder / (f"{stem}.json" if number == 1 else f"{stem}_{number}.json")
            try:
                with file.open("x") as out:
                    out.write(self.text())
                break
            except FileExistsError:
                if file.read_bytes() == self.text().encode():
                    break
        return file


def read(file: Path) -> Run:
    """The run in a file of `Run.write`. Raises HistoryError."""
    with naming(file, "remove the file, or add the run anew from pytest-benchmark's JSON"):
        raw = json_of(file)
        if raw.get("schema") != SCHEMA:
            raise ValueError(f"it is of schema {raw.get('schema')!r}, and {SCHEMA} is what can be read")
        kinds = {"device": str, "time": str, "commit": str, "dirty": bool, "versions": dict, "ceilings": dict}
        head = {name: taken(raw, name, kind) for name, kind in kinds.items()}
        if "machine" in raw:  # older files have none
            head["machine"] = taken(raw, "machine", dict)
        return Run(**head, cases=tuple(_unflat(each) for each in taken(raw, "cases", list)))


def folder_name(device: str) -> str:
    """Raises ValueError for a device whose name has neither letters nor digits."""
    name = re.sub(r"[^0-9A-Za-z._+-]+", "-", device).strip("-.") if isinstance(device, str) else ""
    if not name:
        raise ValueError(f"{device!r:.60} names no device")
    return name


def printable(text: str) -> str:
    """The text with newlines, control characters and invisible characters escaped as in Python."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


@contextmanager
def naming(file: Path, remedy: str) -> Iterator[None]:
    """Context that turns errors about `file` into HistoryError, a line with the file, the problem and the remedy."""
    try:
        yield
    except HistoryError:
        raise
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: of brackets without an end
        what = error.strerror if isinstance(error, OSError) else error
        raise HistoryError(printable(f"{file}: {what}; {remedy}")) from error


def json_of(file: Path) -> dict[str, Any]:
    """The object in `file`. Raises ValueError."""
    raw = _parsed(file)
    if not isinstance(raw, dict):
        raise ValueError(f"it holds a {type(raw).__name__}, where a run is an object")
    return raw


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The objects in the list in `file`. Raises ValueError."""
    raw = _parsed(file)
    if not isinstance(raw, list) or not all(isinstance(row, dict) for row in raw):
        raise ValueError("it holds no list of objects")
    return raw


def keep_rows(file: Path, rows: Iterable[Mapping[str, object]]) -> bool:
    """Writes a list of objects, an object a line. Returns False, and writes nothing, if the file has these rows."""
    text = "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"
    if file.exists() and file.read_text() == text:
        return False
    file.write_text(text)
    return True


def _parsed(file: Path) -> Any:
    text = file.read_text()
    if not text.strip():
        raise ValueError("it is empty")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is no JSON ({error})") from error


def is_number(value: object) -> bool:
    """Whether the value is 0, or a number from 1e-100 to 1e100, whose ratios can be computed and shown."""
    return isinstance(value, int | float) and (value == 0 or 1e-100 < abs(value) < 1e100)


def taken(raw: object, name: str, kind: type) -> Any:
    """raw[name], checked to be of type `kind`. Raises ValueError."""
    if not isinstance(raw, dict) or not isinstance(raw.get(name), kind):
        found = f"{raw[name]!r:.60}" if isinstance(raw, dict) and name in raw else "missing"
        raise ValueError(f"{name!r} is {found}, and a {kind.__name__} is wanted")
    return raw[name]


def _check_figures(whose: str, figures: Mapping[str, Any]) -> None:
    for key, value in figures.items():
        if not isinstance(value, str) and not is_number(value):
            raise ValueError(f"{key!r} of {whose} is {value!s:.60}, neither a word nor a finite number")


def _check_seconds(whose: str, seconds: list[Figure | None]) -> None:
    numbers = [each for each in seconds if isinstance(each, int | float)]
    without = numbers != [each for each in seconds if each is not None] or seconds[1] is None
    if without or numbers[0] <= 0 or numbers != sorted(numbers):
        raise ValueError(f"p20, median and p80 of the seconds of {whose} are {seconds}; they must rise, from above 0")


def _flat(case: Case) -> dict[str, Figure]:
    head = {each.name: getattr(case, each.name) for each in fields(case)[:-1]}
    return head | dict(sorted(case.figures.items()))


def _unflat(raw: object) -> Case:
    head = {each.name: taken(raw, each.name, str) for each in fields(Case)[:-1]}
    assert isinstance(raw, dict), "taken has looked"
    return Case(**head, figures={key: value for key, value in raw.items() if key not in head})
