"""Reads a folder of results; a file that cannot be read becomes a line in `problems`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks import compare, history
from benchmarks.compare import Budgets, Comparison
from benchmarks.history import History
from benchmarks.record import HistoryError, Run, is_number, naming, rows_of, taken

ENGINE = {"engine": str, "mesh": str, "shape": list, "pairs": int, "mean": float, "max": float, "ratios": dict}
PREDICTION = {
    "row": str, "figure": str, "predicted": float, "reported": float, "held_out": bool, "source": str
}  # fmt: skip
MEASURED = {"row": str, "figure": str, "predicted": float, "measured": float, "machine": str}
VARIANT = {"variant": str, "target": str, "registers": int, "spill_bytes": int, "shared_bytes": int, "accesses": dict}
MEASURED_FILES = ("predicted_seconds_here.json", "predicted_memory_here.json")  # steps predicted and run on a machine
Rows = tuple[Mapping[str, Any], ...]
T = TypeVar("T")


class Device(NamedTuple):
    """The runs of a device, oldest first, and the newest beside those before it; None: the budgets cannot be read."""

    name: str
    runs: Mapping[str, Run]  # by the names of their files
    comparison: Comparison | None

    @property
    def newest(self) -> Run:
        return list(self.runs.values())[-1]


class Results(NamedTuple):
    """All that was read.

    devices: a GPU's first. engines: rows of reshard_bytes.json. predictions: rows of predicted.json. measured: rows of
    each file of `MEASURED_FILES`, by the file's name. variants: rows of the newest aot/triton-*.json.
    """

    devices: tuple[Device, ...]
    engines: Rows
    predictions: Rows
    measured: Mapping[str, Rows]
    variants: Rows
    triton: str
    budgets: int
    problems: tuple[str, ...]


def read(results: Path, budgets_file: Path = compare.BUDGETS) -> Results:
    """All files that can be read. `problems` has a line for each other file, with its path in the folder."""
    problems: list[str] = []

    def attempted(read_it: Callable[[], T], otherwise: T) -> T:
        try:
            return read_it()
        except HistoryError as error:
            problems.append(str(error))
            return otherwise

    budgets = attempted(lambda: Budgets.read(budgets_file), None)
    histories = [history.runs(folder, results) for folder in history.devices(results)]
    problems += [line for found in histories for line in found.unreadable]
    devices = [_device(found, budgets) for found in histories if found.runs]
    compiled = max(results.glob("aot/triton-*.json"), key=_version, default=None)

    def shared(file: Path | None, wanted: Mapping[str, type]) -> Rows:
        return attempted(lambda: _rows(file, wanted), ()) if file and file.exists() else ()

    return Results(
        devices=tuple(sorted(devices, key=lambda device: (device.newest.on_cpu, device.name))),
        engines=shared(results / "reshard_bytes.json", ENGINE),
        predictions=shared(results / "predicted.json", PREDICTION),
        measured={name: shared(results / name, MEASURED) for name in MEASURED_FILES},
        variants=shared(compiled, VARIANT),
        triton=compiled.stem.removeprefix("triton-") if compiled else "",
        budgets=len(budgets.counts) if budgets else 0,
        problems=tuple(line.replace(f"{results}/", "") for line in problems),
    )


def _device(found: History, budgets: Budgets | None) -> Device:
    *earlier, newest = found.runs.values()
    comparison = compare.compare(newest, compare.beside(newest, earlier), budgets) if budgets else None
    return Device(newest.device, found.runs, comparison)


def _rows(file: Path, wanted: Mapping[str, type]) -> Rows:
    with naming(file, "run what writes it again"):
        rows = rows_of(file)
        for row in rows:
            for name, kind in wanted.items():
                taken(row, name, kind)
            ratios = row.get("ratios", {})
            told = (row.get(name, 1) for name in ("mean", "max", "predicted", "reported", "measured"))
            for number in (*told, *map(float, ratios), *ratios.values()):
                if not is_number(number) or number <= 0:
                    raise ValueError(f"{number!s:.60} is among its numbers, and one above 0 is wanted")
        return tuple(rows)


def _version(file: Path) -> tuple[int, ...]:
    """3.10 is newer than 3.9."""
    return tuple(int(part) for part in file.stem.removeprefix("triton-").split(".") if part.isdigit())
