"""Finds and reads records of examples in files of JSON lines, JSON, CSV and Parquet, with their places for errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..inputs import (
    BLANK,
    BadRecord,
    FileRange,
    InputPart,
    LeftOut,
    RecordPlace,
    check_pyarrow,
    cut_file,
    cut_inputs,
    list_names,
    read_records,
    type_name,
)
from ..kinds import FileKind, kind_of
from ..parquet import column_names, group_sizes, read_rows

# All fields that `forms.py` reads. Further columns of a Parquet file are not read.
FIELDS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "chosen",
    "rejected",
    "label",
    "tools",
    "chat_template_kwargs",
)
REMEDY = "mend the record, or skip bad records with weft data prepare --skip-bad"  # the end of errors about a record
_LABELS = {"true": True, "1": True, "false": False, "0": False}  # in CSV


def find_record_parts(
    inputs: Sequence[Path], part_bytes: int, *, skip_bad: bool = False, leave_out: Path | None = None
) -> list[InputPart]:
    """Find the records under `inputs`, in order, in parts of about `part_bytes` each. No record is read yet.

    `read_examples` reads a part; `weft data prepare --task` makes a shard of each. JSON lines are cut between lines,
    Parquet between row groups, CSV and JSON nowhere. The cuts depend on the files alone.
    skip_bad: leave out damaged files, unless `inputs` names the file itself.
    leave_out: a folder within an input to pass over, as the output.
    Raises ValueError for a missing path, for inputs without any record, for a named file without records, and for a
    damaged file.
    """

    def pieces_of(file: Path, is_named: bool) -> Iterator[FileRange]:
        return _pieces(file, is_named, part_bytes, skip_bad)

    parts = cut_inputs(inputs, pieces_of, part_bytes, leave_out=leave_out, accepted="JSONL, JSON, CSV or Parquet")
    if not any(piece.nbytes and piece.kind is not FileKind.NONE for part in parts for piece in part):
        raise ValueError(
            f"no records of examples are in {', '.join(map(str, inputs))}; give files of JSONL, JSON, CSV or Parquet"
        )
    return parts


def _pieces(file: Path, is_named: bool, part_bytes: int, skip_bad: bool) -> Iterator[FileRange]:
    groups: list[int] = []
    try:
        kind = kind_of(file, FIELDS, is_named=is_named)
        if kind is FileKind.TEXT and is_named:
            raise ValueError(f"{file} holds text, not records of examples; give files of JSONL, JSON, CSV or Parquet")
        if kind is FileKind.PARQUET:
            check_pyarrow(file)
            _check_columns(file)
            groups = group_sizes(file)
    except ModuleNotFoundError as error:  # the file may be sound: skip_bad does not apply
        raise ValueError(str(error)) from None
    except ValueError:
        if is_named or not skip_bad:
            raise
        kind = FileKind.NONE
    yield from cut_file(file, FileKind.NONE if kind is FileKind.TEXT else kind, is_named, part_bytes, groups)


def _check_columns(file: Path) -> None:
    names = column_names(file)
    if not set(names) & set(FIELDS):
        raise ValueError(
            f"{file} has the columns {list_names(names)}, and none of an example: {', '.join(FIELDS)}; rename its "
            f"columns"
        )
    if twice := [name for name in FIELDS if names.count(name) > 1]:
        raise ValueError(f"{file} has {names.count(twice[0])} columns {twice[0]!r}; leave one")


def read_examples(
    part: InputPart, left_out: LeftOut, *, skip_bad: bool = False
) -> Iterator[tuple[RecordPlace, dict[str, Any]]]:
    """The records of a part from `find_record_parts`, in order, each with the record's place.

    left_out: filled here: the number of blank lines (`empty`) and of bad records (`bad`), the files without records
        (`skipped`) and the entries of folders besides files (`passed`).
    skip_bad: leave out bad records: lines without JSON, and JSON without an object.
    Raises ValueError for a damaged file and, unless skip_bad, for a bad record, with file and line.
    """
    for piece in part:
        if piece.passed:
            left_out.passed.append(piece.passed)
        elif piece.kind is FileKind.NONE:
            left_out.skipped.append(str(piece.path))
        elif piece.kind is FileKind.PARQUET:
            for number, row in read_rows(piece.path, FIELDS, range(piece.start, piece.stop)):
                yield RecordPlace(piece.path, "row", number), row
        else:
            yield from _objects(piece, left_out, skip_bad)


def _objects(piece: FileRange, left_out: LeftOut, skip_bad: bool) -> Iterator[tuple[RecordPlace, dict[str, Any]]]:
    for place, record in read_records(piece):
        if record is BLANK:
            left_out.empty += 1
        elif isinstance(record, dict):
            yield place, _with_label(record) if piece.kind is FileKind.TABLE else record
        elif skip_bad:
            left_out.bad += 1
        else:
            problem = record.problem if isinstance(record, BadRecord) else f"is {type_name(record)}, not an object"
            raise ValueError(f"{place} {problem}; {REMEDY}")


def _with_label(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a CSV file, where all values are text, with the label, as "true" or "0", turned into a bool."""
    label = _LABELS.get(str(record.get("label")).lower())
    return record if label is None else record | {"label": label}
