"""Read metrics.jsonl back: to resume a run, to check the file against a checkpoint, and to plot."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..documents import parse_json, read_plain
from .bounds import LARGEST

METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Logged:
    """A step's line of metrics.jsonl: the text, with the newline, and the parsed values."""

    text: str
    step: int
    loss: float
    tokens_per_second: float
    held_out_loss: float | None


def read_logged(path: Path, until: int | None = None) -> list[Logged]:
    """Read the lines of metrics.jsonl up to step `until`, or all if None.

    Empty for a missing file, and for a file whose first step comes later. Lines after step `until` are not checked: a
    killed run may leave anything there. A last line without a newline is ignored.
    Raises ValueError, with the file and the line number, for malformed lines and missing steps.
    """
    found: list[Logged] = []
    if until == 0 or not path.exists():
        return found
    lines = _content(path).split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        each = _read(line)
        if each is None or (found and each.step != found[-1].step + 1):
            wrong = (
                "is not as it was written" if each is None else f"is of step {each.step}, but follows {found[-1].step}"
            )
            raise ValueError(f"{path}, line {number} {wrong}; {_REMEDY}")
        if until is not None and each.step > until:
            break
        found.append(each)
        if each.step == until:
            break
    if until is not None and found and found[-1].step < until:
        raise ValueError(
            f"{path} ends with line {len(lines)}, of step {found[-1].step}, before step {until}; {_REMEDY}"
        )
    return found


_REMEDY = "copy the file again, or resume into a new folder with --resume PATH --output FOLDER"


def last_line(path: Path) -> dict[str, Any] | None:
    """The last complete line of a metrics.jsonl as a dict; None for a missing file or a malformed line."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(-min(_LONGEST_LINES, path.stat().st_size), os.SEEK_END)
        lines = file.read().split(b"\n")[:-1]
    if not lines or _read(lines[-1]) is None:
        return None
    value: dict[str, Any] = json.loads(lines[-1])
    return value if type(value.get("done")) in (int, float) else None


_LARGEST = 2**34  # bytes of a file; enough for the lines of 17 million steps
_LONGEST_LINES = 16384  # bytes read from the end of the file; a line has about a thousand


class Sum:
    """Running length and SHA-256 of metrics.jsonl.

    Stored in every checkpoint; on resuming, `check_logged` compares the file with the stored values.
    """

    def __init__(self) -> None:
        self._lines = self._nbytes = 0
        self._sha256 = hashlib.sha256()

    def add(self, text: str) -> None:
        """Add one more line, with its newline."""
        self._lines += 1
        self._nbytes += len(text.encode())
        self._sha256.update(text.encode())

    def as_json(self) -> dict[str, Any]:
        return {"lines": self._lines, "bytes": self._nbytes, "sha256": self._sha256.hexdigest()}


def check_logged(path: Path, saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless the file begins with the lines described by `saved`, from `Sum.as_json`."""
    content = _content(path)[: saved["bytes"]] if path.exists() else b""
    if len(content) < saved["bytes"]:
        raise ValueError(
            f"{path} has {len(content)} bytes, but its {saved['lines']} lines had {saved['bytes']} when the checkpoint "
            f"was saved; {_REMEDY}"
        )
    if hashlib.sha256(content).hexdigest() != saved["sha256"]:
        raise ValueError(f"{path} was changed in its first {saved['lines']} lines after they were written; {_REMEDY}")


def _content(path: Path) -> bytes:
    """The bytes of the file. Raises ValueError for an unreadable file."""
    try:
        return read_plain(path, limit=_LARGEST)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from None


def _read(line: bytes) -> Logged | None:
    """The line as a `Logged`; None for a malformed line."""
    try:
        value = parse_json(line, METRICS, _REMEDY)
        step, held_out = value["step"], value["held_out_loss"]
        each = Logged(f"{line.decode()}\n", step, value["loss"], value["tokens_per_second"], held_out)
    except (ValueError, KeyError):
        return None
    numbers = [each.loss, each.tokens_per_second, *([] if held_out is None else [held_out])]
    is_whole = type(step) is int and 0 < step <= LARGEST and all(map(_is_number, numbers))
    return each if is_whole else None


def _is_number(value: object) -> bool:
    """Whether a JSON value is a number within the range of floats."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
