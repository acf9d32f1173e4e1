"""Files of records of every task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.models.data.examples.example import Task


def record(task: Task, number: int) -> dict[str, Any]:
    """A record whose texts hold its number."""
    prompt = f"{number}? " + "why " * (number % 7)
    if task == "dpo":
        return {"prompt": prompt, "chosen": f"yes {number}" + "!" * (number % 5), "rejected": f"no {number}"}
    completion = {"prompt": prompt, "completion": f"since {number}" + "." * (number % 11)}
    return completion | ({"label": number % 3 > 0} if task == "kto" else {})


def write_records(file: Path, task: Task, count: int) -> Path:
    file.write_text("".join(json.dumps(record(task, number)) + "\n" for number in range(count)))
    return file
