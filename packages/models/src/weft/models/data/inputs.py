"""Reads records and documents from files of text, JSON, CSV and Parquet, in parts independent of one another."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..terminal import install_command
from .kinds import BOM, TABLE_DELIMITERS, FileKind, kind_of
from .parquet import read_column, row_groups
from .text import entries_under

LONGEST_VALUE = 2**31 - 1  # characters of a value of CSV; the csv module's default is 131,072
NAMED = 12  # the most fields listed in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """A range of an input file; or an entry of a folder without documents, to be counted only."""

    path: Path
    # The range, from start up to stop. Lines of JSON: the lines beginning between these two bytes. Parquet: these row
    # groups. Other kinds: the whole file.
    start: int
    stop: int
    is_named: bool  # whether the caller named the file; a named file is not skipped
    nbytes: int  # about the bytes to read
    kind: FileKind = FileKind.TEXT  # how the file is read
    passed: str = ""  # description of an entry of a folder that is no file; empty for files


InputPart = tuple[FileRange, ...]  # `prepare` makes a shard of each part


def newest_time(parts: Sequence[InputPart]) -> datetime:
    """When the newest input was changed, in whole seconds of UTC: the current time for chat templates.

    Rendered texts are then equal in every run and process.
    """
    newest = max(piece.path.stat().st_mtime_ns for part in parts for piece in part)
    return datetime.fromtimestamp(newest // 10**9, UTC).replace(tzinfo=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where the text of a record is, and whether records without a text are left out."""

    field: str = "text"  # in JSON
    column: str | None = None  # in Parquet, CSV and TSV; None for the same as field
    # Leave out records without a text, and files of a folder for which `find_parts` would raise.
    skip_bad: bool = False

    @property
    def name(self) -> str:
        """The column to read."""
        return self.field if self.column is None else self.column


@dataclass(slots=True)
class LeftOut:
    """Counts and names of input that made no document or example.

    A caller of `read_part` or `read_examples` makes an empty instance, for a part or for all parts; the function fills
    the instance while yielding.
    """

    empty: int  # documents without text, blank lines
    skipped: list[str]  # files without text or records
    bad: int  # records left out under skip_bad
    passed: list[str]  # descriptions of entries of folders besides files


def find_parts(
    inputs: Sequence[Path], columns: Columns, part_bytes: int, *, leave_out: Path | None = None
) -> list[InputPart]:
    """The documents under `inputs`, in order, in parts of about `part_bytes` each; depends on the files alone.

    Small files share a part. JSON lines are cut between lines, Parquet between row groups, further kinds nowhere.
    leave_out: a folder within an input to pass over.
    Raises ValueError for a missing path, for inputs without any text, and for a file of an unknown or damaged kind or
    without the column. With `columns.skip_bad`, these files are left out where the caller named only their folder.
    """

    def pieces_of(file: Path, is_named: bool) -> Iterator[FileRange]:
        return _pieces(file, is_named, columns, part_bytes)

    parts = cut_inputs(inputs, pieces_of, part_bytes, leave_out=leave_out, accepted="text, JSONL or Parquet")
    if not any(piece.nbytes for part in parts for piece in part):
        raise ValueError(f"{', '.join(map(str, inputs))} hold no text; give files that do, or folders of them")
    return parts


def cut_inputs(
    inputs: Sequence[Path],
    pieces_of: Callable[[Path, bool], Iterable[FileRange]],
    part_bytes: int,
    *,
    leave_out: Path | None,
    accepted: str,
) -> list[InputPart]:
    """The pieces of all files under `inputs`, in order, in parts of about `part_bytes` each.

    pieces_of: called with each file, and whether the caller named it, for the file's pieces.
    leave_out: a folder within an input to pass over. accepted: the formats named in the error for a missing path.
    Raises ValueError for a missing path.
    """
    parts: list[list[FileRange]] = [[]]
    part_size = 0
    for path in inputs:
        if not path.exists():
            raise ValueError(f"{path} does not exist; give files, or folders of them: {accepted}")
        entries = entries_under(path, leave_out)
        pieces = (piece for file in entries.files for piece in pieces_of(file, path.is_file()))
        for piece in (*pieces, *(_entry_piece(path, description) for description in entries.passed)):
            if parts[-1] and part_size + piece.nbytes > part_bytes:
                parts.append([])
                part_size = 0
            parts[-1].append(piece)
            part_size += piece.nbytes
    return [tuple(part) for part in parts]


def _entry_piece(path: Path, description: str) -> FileRange:
    return FileRange(path=path, start=0, stop=0, is_named=False, nbytes=0, kind=FileKind.NONE, passed=description)


def _pieces(file: Path, is_named: bool, columns: Columns, part_bytes: int) -> Iterator[FileRange]:
    """The pieces of a file, each of about `part_bytes`."""
    groups: list[int] = []
    try:
        kind = kind_of(file, (columns.field,), is_named=is_named)
        if kind is FileKind.PARQUET:
            check_pyarrow(file)
            groups = row_groups(file, columns.name)
        if kind is FileKind.TABLE:
            _check_table(file, columns.name)
    except ModuleNotFoundError as error:  # the file may be sound: skip_bad does not apply
        raise ValueError(str(error)) from None
    except ValueError:
        if is_named or not columns.skip_bad:
            raise
        kind = FileKind.NONE
    yield from cut_file(file, kind, is_named, part_bytes, groups)


def check_pyarrow(file: Path) -> None:
    """Raises ModuleNotFoundError, which names the Parquet file to read, where pyarrow is not installed."""
    if find_spec("pyarrow") is None:
        raise ModuleNotFoundError(f"pyarrow is not installed, which reads {file}; {install_command('pyarrow')}")


def cut_file(file: Path, kind: FileKind, is_named: bool, part_bytes: int, groups: Sequence[int]) -> Iterator[FileRange]:
    """The pieces of a file, each of about `part_bytes`. groups: of Parquet, the bytes of each row group."""
    size = file.stat().st_size
    if kind is FileKind.PARQUET:
        pieces = [(i, i + 1, nbytes) for i, nbytes in enumerate(groups)]
    elif kind is FileKind.LINES:
        starts = range(0, size, part_bytes)
        pieces = [(start, min(start + part_bytes, size), min(part_bytes, size - start)) for start in starts]
    else:
        pieces = [(0, size, size)]
    for start, stop, nbytes in pieces:
        yield FileRange(path=file, start=start, stop=stop, is_named=is_named, nbytes=nbytes, kind=kind)


def read_part(part: InputPart, columns: Columns, left_out: LeftOut) -> Iterator[str]:
    """The texts of a part's documents, without empty texts; `left_out` counts the rest.

    Reads a part from `find_parts`: to prepare data, to train on records, or to learn a tokenizer.
    Raises ValueError for a named file not in UTF-8, a damaged file, and, unless skip_bad, a record without text in the
    field.
    """
    for piece in part:
        for text in _read(piece, columns, left_out):
            if text:
                yield text
            else:
                left_out.empty += 1


def _read(piece: FileRange, columns: Columns, left_out: LeftOut) -> Iterable[str]:
    if piece.passed:
        left_out.passed.append(piece.passed)
        return ()
    if piece.kind is FileKind.NONE:
        left_out.skipped.append(str(piece.path))
        return ()
    if piece.kind is FileKind.TEXT:
        return _read_text(piece, left_out)
    if piece.kind is FileKind.PARQUET:
        return (text or "" for text in read_column(piece.path, columns.name, list(range(piece.start, piece.stop))))
    return _texts_of(read_records(piece), columns, left_out)


def _texts_of(records: Iterable[tuple[RecordPlace, Any]], columns: Columns, left_out: LeftOut) -> Iterator[str]:
    """The texts of records. A record without text is counted under skip_bad; else raises ValueError."""
    for place, record in records:
        is_table = place.unit == "row"
        text = _field_of(record, columns.name if is_table else columns.field)
        if isinstance(text, str):
            yield text
        elif columns.skip_bad:
            left_out.bad += 1
        else:
            byte = "" if place.byte is None else f", at byte {place.byte},"
            raise ValueError(f"{place}{byte} {text.problem}; mend the record, or skip bad records with --skip-bad")


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Where a record is, for errors: printed as "pairs.jsonl: line 7"."""

    path: Path
    unit: str  # "line", "item" of a list, "row" of a table
    number: int | None  # counted from 1; None for lines, which are counted when the place is printed
    byte: int | None = None  # of lines: the first byte of the line

    def __str__(self) -> str:
        number = _line_number(self.path, self.byte or 0) if self.number is None else self.number
        return f"{self.path}: {self.unit} {number}"


@dataclass(frozen=True, slots=True)
class BadRecord:
    """In place of a record: the problem of an unreadable record, or of a record without usable text."""

    problem: str


BLANK = BadRecord("is blank")  # a blank line


def read_records(piece: FileRange) -> Iterator[tuple[RecordPlace, Any]]:
    """The records of a piece of JSON lines, of a list of JSON, or of a table, with their places.

    A record is any value of JSON, a `BadRecord` or `BLANK`; for a table, a dict of texts.
    Raises ValueError for an unreadable list or table.
    """
    return {FileKind.LINES: _read_lines, FileKind.LIST: _read_list, FileKind.TABLE: _read_table}[piece.kind](piece)


def _read_text(piece: FileRange, left_out: LeftOut) -> Iterator[str]:
    content = piece.path.read_bytes()
    try:
        yield content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        if piece.is_named:
            raise ValueError(f"{piece.path} is not UTF-8 text (byte {error.start} of the file); convert it") from None
        left_out.skipped.append(str(piece.path))


def _read_lines(piece: FileRange) -> Iterator[tuple[RecordPlace, Any]]:
    with piece.path.open("rb") as file:
        if piece.start:  # a line across the boundary belongs to the previous piece
            file.seek(piece.start - 1)
            file.readline()
        while (byte := file.tell()) < piece.stop and (line := file.readline()):
            yield RecordPlace(piece.path, "line", None, byte), _parse_line(line if byte else line.removeprefix(BOM))


def _line_number(path: Path, place: int) -> int:
    """The number of the line beginning at byte `place`, from 1 on."""
    number = 1
    with path.open("rb") as file:
        while place > 0 and (content := file.read(min(place, 1 << 20))):
            number += content.count(b"\n")
            place -= len(content)
    return number


def _read_list(piece: FileRange) -> Iterator[tuple[RecordPlace, Any]]:
    try:
        records = json.loads(piece.path.read_bytes().removeprefix(BOM).decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{piece.path} is not UTF-8 (byte {error.start} of the file); convert it") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{piece.path} begins as a list of objects, and is not JSON: {error}; mend it") from None
    for number, record in enumerate(records, 1):
        yield RecordPlace(piece.path, "item", number), record


def _open_table(path: Path) -> Any:
    csv.field_size_limit(LONGEST_VALUE)
    text = io.StringIO(path.read_bytes().decode("utf-8-sig"), newline="")
    return csv.reader(text, delimiter=TABLE_DELIMITERS[path.suffix.lower()], strict=True)


def _check_table(path: Path, column: str) -> None:
    """Raises ValueError for a file without the column, and for a file not CSV in UTF-8."""
    if not path.stat().st_size:
        return
    names = next(_rows(path), [])
    if names.count(column) != 1:
        description = "no column" if column not in names else f"{names.count(column)} columns"
        raise ValueError(f"{path} has {description} {column!r}; give one of {list_names(names)} with --column")


def _rows(path: Path) -> Iterator[list[str]]:
    try:
        yield from _open_table(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start} of the file); convert it") from None
    except csv.Error as error:
        raise ValueError(f"{path} is no table of comma- or tab-separated values: {error}; save it again") from None


def _read_table(piece: FileRange) -> Iterator[tuple[RecordPlace, Any]]:
    rows = _rows(piece.path)
    names = next(rows, [])
    for number, row in enumerate(rows, 1):
        place = RecordPlace(piece.path, "row", number)
        if not row:
            yield place, BLANK
        elif len(row) != len(names):
            yield place, BadRecord(f"has {len(row)} values, and there are {len(names)} columns")
        else:
            yield place, dict(zip(names, row, strict=True))


def _parse_line(line: bytes) -> Any:
    """The value of a line of JSON; a `BadRecord` for a line without JSON; `BLANK` for a blank line."""
    if not line.strip():
        return BLANK
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRecord(f"is not UTF-8 (its byte {error.start})")
    except (ValueError, RecursionError):
        return BadRecord("is not JSON")


def _field_of(record: Any, field: str) -> str | BadRecord:
    """The text of a record's field; empty for a blank line; a `BadRecord` for a record without a text there."""
    if isinstance(record, BadRecord):
        return "" if record is BLANK else record
    if not isinstance(record, dict):
        return BadRecord(f"has no field {field!r}: it is {type_name(record)}, not an object")
    if field not in record:
        names = list_names(list(map(str, record)))
        return BadRecord(
            f"has no field {field!r}" + (f" (it has {names}: name one with --field)" if record else ", nor another")
        )
    text = record[field]
    if not isinstance(text, str):
        return BadRecord(f"has no text in its field {field!r}, but {type_name(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON may escape half of a surrogate pair, which is no character
        return BadRecord(f"has half a surrogate pair in its field {field!r}")
    return text


def type_name(value: Any) -> str:
    """The name of a value's type, for errors; "null" for None."""
    return "null" if value is None else type(value).__name__


def list_names(names: Sequence[str]) -> str:
    """The first names of fields, for errors."""
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
