"""Tables of measurements, JSON files with a line for each row: which of two ways was faster for a class of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Self, get_type_hints


class TableRow:
    """Base class of rows: dataclasses with a field `of`, a NamedTuple, which is the row's key in the table.

    The other fields are numbers, strings or dataclasses.
    """

    of: Any

    @classmethod
    def read(cls, file: Path) -> dict[Any, Self]:
        """The table in a JSON file, by key."""
        kinds = get_type_hints(cls)
        rows = (
            cls(**{name: kinds[name](**value) if isinstance(value, dict) else value for name, value in row.items()})
            for row in json.loads(file.read_text())
        )
        return {row.of: row for row in rows}

    def as_json(self) -> dict[str, Any]:
        """The fields; a key or a dataclass as a dict."""
        assert is_dataclass(self)
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value._asdict() if name == "of" else asdict(value) if is_dataclass(value) else value
            for name, value in values.items()
        }


def write_table(rows: Mapping[Any, TableRow], file: Path) -> None:
    """Writes a table with a line for each row, for short diffs when a measurement changes."""
    lines = [json.dumps(rows[of].as_json()) for of in sorted(rows)]
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n")
