"""metrics.jsonl, read back: when its run goes on, and when it is drawn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Logged:
    """A step's line, as it stands in the file, and what is read of it."""

    text: str
    step: int
    loss: float
    tokens_per_second: float
    held_out_loss: float | None


def read_logged(path: Path, until: int | None = None) -> list[Logged]:
    """The lines of the steps up to `until`, of all where None; none where there is no file, or it begins after that step.

    What comes after them is not looked at: a run that is killed leaves there what it will. A last line without an end is none.
    Raises ValueError, with the file and the number of the line, where one is not as a run writes it, or lines are missing.
    """
    found: list[Logged] = []
    if until == 0 or not path.exists():
        return found
    lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        each = _read(line)
        if each is None or (found and each.step != found[-1].step + 1):
            wrong = (
                "is not as it was written" if each is None else f"is of step {each.step}, and follows {found[-1].step}"
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


_REMEDY = "copy the file again, or move it away, and the metrics begin anew"


def _read(line: bytes) -> Logged | None:
    try:
        value = json.loads(line)
        step, held_out = value["step"], value["held_out_loss"]
        each = Logged(f"{line.decode()}\n", step, value["loss"], value["tokens_per_second"], held_out)
    except (ValueError, KeyError, TypeError):
        return None
    numbers = [each.loss, each.tokens_per_second, *([] if held_out is None else [held_out])]
    is_whole = type(step) is int and all(type(number) in (int, float) for number in numbers)
    return each if is_whole else None
