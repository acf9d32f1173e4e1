"""Documents in files of text, JSON, CSV and Parquet, in parts that can be read independently."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..terminal import install_command
from .kinds import BOM, TABLE_DELIMITERS, Kind, kind_of
from .text import entries_under

ROWS_AT_ONCE = 256
BYTES_AT_ONCE = 8 << 20
AS_CODES = 32 << 20  # row groups up to this number of bytes are read as codes and a table of values


def row_groups(file: Path, column: str) -> list[int]:
    """The bytes of each row group, of all columns together.

    Raises ValueError for a damaged file, a missing column, and a column without text.
    """
    opened = _open(file)
    names = opened.schema_arrow.names
    if column not in names:
        raise ValueError(f"{file} has no column {column!r}; give one of {', '.join(names)} with --column")
    kind = str(opened.schema_arrow.field(column).type)
    if kind.removeprefix("dictionary<values=").partition(",")[0] not in ("string", "large_string", "string_view"):
        raise ValueError(f"{file}: column {column!r} is {kind}, not text; give another with --column")
    return [_group_bytes(opened, group) for group in range(opened.metadata.num_row_groups)]


def read_column(file: Path, column: str, groups: list[int]) -> Iterator[str | None]:
    """The texts of a column in some row groups; None for a null. Raises ValueError for a damaged file.

    Many rows may share a value of the file, and a file of a few hundred bytes can have rows of gigabytes. A small
    row group is therefore read as codes, with each value in memory once; a larger row group is read in batches of
    about BYTES_AT_ONCE.
    """
    try:
        for group in groups:
            opened = _open(file)
            nbytes, rows = _group_bytes(opened, group), max(opened.metadata.row_group(group).num_rows, 1)
            if nbytes <= AS_CODES:
                opened = _open(file, read_dictionary=[column])
            batch_rows = min(max(BYTES_AT_ONCE * rows // max(nbytes, 1), 1), ROWS_AT_ONCE)
            for batch in opened.iter_batches(batch_rows, row_groups=[group], columns=[column]):
                yield from (value.as_py() for value in batch.column(0))
    except _damages() as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}; save it again") from None


def _open(file: Path, **options: Any) -> Any:
    try:
        return import_module("pyarrow.parquet").ParquetFile(file, memory_map=True, **options)
    except _damages() as error:
        raise ValueError(f"{file} is not a Parquet file: {' '.join(str(error).split())}; save it again") from None


def _damages() -> tuple[type[Exception], ...]:
    """The errors raised for a damaged file: by the system, by decoding, and the base class of all pyarrow errors."""
    arrow: type[Exception] = import_module("pyarrow").ArrowException
    return arrow, ValueError, OSError


def _group_bytes(opened: Any, group: int) -> int:
    """The unpacked bytes of a row group's pages, of all columns together; rows may share a value.

    `RowGroupMetaData.column` would give the bytes of a column alone, and aborts the process for damaged statistics.
    """
    return int(opened.metadata.row_group(group).total_byte_size)


LONGEST_VALUE = 2**31 - 1  # characters of a value of CSV; the csv module's default is 131,072
NAMED = 12  # the most fields listed in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of an input file; or a folder's entry that has no documents and is only counted."""

    path: Path
    # The range, from start up to stop. Lines of JSON: the lines beginning between these two bytes. Parquet: these row
    # groups. Other kinds: the whole file.
    start: int
    stop: int
    is_named: bool  # whether the caller named the file; a named file is not skipped
    nbytes: int  # about the bytes to read
    kind: Kind = Kind.TEXT  # how the file is read
    passed: str = ""  # description of an entry passed over because it is no file; empty for files


Part = tuple[Piece, ...]  # read in one go: `prepare` makes one shard of each part


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where a record holds its text."""

    field: str = "text"  # in JSON
    column: str | None = None  # in Parquet, CSV and TSV; None for the same as field
    # Leave out records without a text there, and files of a folder for which `find_parts` would raise.
    skip_bad: bool = False

    @property
    def name(self) -> str:
        """The column to read."""
        return self.field if self.column is None else self.column


@dataclass(slots=True)
class LeftOut:
    """Counts and names of input that yielded no document.

    A caller of `read_part` makes an empty instance, for one part or for all. `read_part` fills it while yielding texts.
    """

    empty: int  # documents without text
    skipped: list[str]  # files without text
    bad: int  # records without text, under skip_bad
    passed: list[str]  # entries of folders that are no files


def find_parts(
    inputs: Sequence[Path], columns: Columns, part_bytes: int, *, leave_out: Path | None = None
) -> list[Part]:
    """The documents under `inputs`, in order, in parts of about `part_bytes` each; depends on the files alone.

    Small files share a part. JSON lines are cut between lines, Parquet between row groups, other files nowhere.
    leave_out: a folder within an input that is not read.
    Raises ValueError for a missing path, for inputs without any text, and for a file of an unknown or damaged kind or
    without the column. With `columns.skip_bad`, these files are left out where the caller named only their folder.
    """
    parts: list[list[Piece]] = [[]]
    part_size = 0
    for path in inputs:
        if not path.exists():
            raise ValueError(f"{path} does not exist; give files, or folders of them: text, JSONL or Parquet")
        entries = entries_under(path, leave_out)
        pieces = (piece for file in entries.files for piece in _pieces(file, path.is_file(), columns, part_bytes))
        for piece in (*pieces, *(_entry_piece(path, description) for description in entries.passed)):
            if parts[-1] and part_size + piece.nbytes > part_bytes:
                parts.append([])
                part_size = 0
            parts[-1].append(piece)
            part_size += piece.nbytes
    if not any(piece.nbytes for part in parts for piece in part):
        raise ValueError(f"{', '.join(map(str, inputs))} hold no text; give files that do, or folders of them")
    return [tuple(part) for part in parts]


def _entry_piece(path: Path, description: str) -> Piece:
    return Piece(path=path, start=0, stop=0, is_named=False, nbytes=0, kind=Kind.NONE, passed=description)


def _pieces(file: Path, is_named: bool, columns: Columns, part_bytes: int) -> Iterator[Piece]:
    """The pieces of a file, each of about `part_bytes`."""
    try:
        kind = kind_of(file, columns.field, is_named=is_named)
        if kind is Kind.PARQUET and find_spec("pyarrow") is None:
            raise ModuleNotFoundError(f"pyarrow is not installed, which reads {file}; {install_command('pyarrow')}")
        groups = row_groups(file, columns.name) if kind is Kind.PARQUET else []
        if kind is Kind.TABLE:
            _check_table(file, columns.name)
    except ModuleNotFoundError as error:  # the file may be sound: skip_bad does not skip it
        raise ValueError(str(error)) from None
    except ValueError:
        if is_named or not columns.skip_bad:
            raise
        kind = Kind.NONE
    size = file.stat().st_size
    if kind is Kind.PARQUET:
        pieces = [(i, i + 1, nbytes) for i, nbytes in enumerate(groups)]
    elif kind is Kind.LINES:
        starts = range(0, size, part_bytes)
        pieces = [(start, min(start + part_bytes, size), min(part_bytes, size - start)) for start in starts]
    else:
        pieces = [(0, size, size)]
    for start, stop, nbytes in pieces:
        yield Piece(path=file, start=start, stop=stop, is_named=is_named, nbytes=nbytes, kind=kind)


def read_part(part: Part, columns: Columns, left_out: LeftOut) -> Iterator[str]:
    """The texts of a part's documents, without empty texts; `left_out` counts the rest.

    Reads a part from `find_parts`: to prepare data, to train on records, or to learn a tokenizer.
    Raises ValueError for a named file that is not UTF-8, a damaged file, and, unless skip_bad, a record without
    text in its field.
    """
    for piece in part:
        for text in _read(piece, columns, left_out):
            if text:
                yield text
            else:
                left_out.empty += 1


def _read(piece: Piece, columns: Columns, left_out: LeftOut) -> Iterable[str]:
    if piece.passed:
        left_out.passed.append(piece.passed)
        return ()
    if piece.kind is Kind.NONE:
        left_out.skipped.append(str(piece.path))
        return ()
    if piece.kind is Kind.TEXT:
        return _read_text(piece, left_out)
    if piece.kind is Kind.PARQUET:
        return (text or "" for text in read_column(piece.path, columns.name, list(range(piece.start, piece.stop))))
    records = {Kind.LINES: _read_lines, Kind.LIST: _read_list, Kind.TABLE: _read_table}[piece.kind](piece, columns)
    return _checked_texts(piece.path, records, columns, left_out)


def _checked_texts(
    path: Path, records: Iterable[tuple[str, str | _BadRecord]], columns: Columns, left_out: LeftOut
) -> Iterator[str]:
    """The texts of pairs (place, text). A record without text is counted under skip_bad; else raises ValueError."""
    for place, text in records:
        if isinstance(text, str):
            yield text
        elif columns.skip_bad:
            left_out.bad += 1
        else:
            raise ValueError(f"{path}: {place} {text.problem}; mend the record, or skip bad records with --skip-bad")


def _read_text(piece: Piece, left_out: LeftOut) -> Iterator[str]:
    content = piece.path.read_bytes()
    try:
        yield content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        if piece.is_named:
            raise ValueError(f"{piece.path} is not UTF-8 text (byte {error.start} of the file); convert it") from None
        left_out.skipped.append(str(piece.path))


def _read_lines(piece: Piece, columns: Columns) -> Iterator[tuple[str, str | _BadRecord]]:
    with piece.path.open("rb") as file:
        if piece.start:  # a line across the boundary belongs to the previous piece
            file.seek(piece.start - 1)
            file.readline()
        while (place := file.tell()) < piece.stop and (line := file.readline()):
            text = _text_of(line if place else line.removeprefix(BOM), columns.field)
            place_text = "" if isinstance(text, str) else f"line {_line_number(piece.path, place)}, at byte {place},"
            yield place_text, text


def _line_number(path: Path, place: int) -> int:
    """The number of the line beginning at byte `place`, from 1 on."""
    number = 1
    with path.open("rb") as file:
        while place > 0 and (content := file.read(min(place, 1 << 20))):
            number += content.count(b"\n")
            place -= len(content)
    return number


def _read_list(piece: Piece, columns: Columns) -> Iterator[tuple[str, str | _BadRecord]]:
    try:
        records = json.loads(piece.path.read_bytes().removeprefix(BOM).decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{piece.path} is not UTF-8 (byte {error.start} of the file); convert it") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{piece.path} begins as a list of objects, and is not JSON: {error}; mend it") from None
    for number, record in enumerate(records, 1):
        yield f"item {number}", _field_of(record, columns.field)


def _open_table(path: Path) -> Any:
    csv.field_size_limit(LONGEST_VALUE)
    text = io.StringIO(path.read_bytes().decode("utf-8-sig"), newline="")
    return csv.reader(text, delimiter=TABLE_DELIMITERS[path.suffix.lower()], strict=True)


def _check_table(path: Path, column: str) -> None:
    """Raises ValueError for a file without the column, and for a file other than CSV in UTF-8."""
    if not path.stat().st_size:
        return
    names = next(_rows(path), [])
    if names.count(column) != 1:
        description = "no column" if column not in names else f"{names.count(column)} columns"
        listed = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
        raise ValueError(f"{path} has {description} {column!r}; give one of {listed} with --column")


def _rows(path: Path) -> Iterator[list[str]]:
    try:
        yield from _open_table(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start} of the file); convert it") from None
    except csv.Error as error:
        raise ValueError(f"{path} is no table of comma- or tab-separated values: {error}; save it again") from None


def _read_table(piece: Piece, columns: Columns) -> Iterator[tuple[str, str | _BadRecord]]:
    rows = _rows(piece.path)
    names = next(rows, [])
    for number, row in enumerate(rows, 1):
        if not row:  # a blank line
            yield "", ""
        elif len(row) != len(names):
            yield f"row {number}", _BadRecord(f"has {len(row)} values, and there are {len(names)} columns")
        else:
            yield f"row {number}", row[names.index(columns.name)]


@dataclass(frozen=True, slots=True)
class _BadRecord:
    """A record without a usable text."""

    problem: str


def _text_of(line: bytes, field: str) -> str | _BadRecord:
    if not line.strip():
        return ""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return _BadRecord(f"is not UTF-8 (its byte {error.start})")
    except (ValueError, RecursionError):
        return _BadRecord("is not JSON")
    return _field_of(record, field)


def _field_of(record: Any, field: str) -> str | _BadRecord:
    if not isinstance(record, dict):
        return _BadRecord(f"has no field {field!r}: it is {_type_name(record)}, not an object")
    if field not in record:
        names = ", ".join(list(map(str, record))[:NAMED]) + (", ..." if len(record) > NAMED else "")
        return _BadRecord(
            f"has no field {field!r}" + (f" (it has {names}: name one with --field)" if record else ", nor another")
        )
    text = record[field]
    if not isinstance(text, str):
        return _BadRecord(f"has no text in its field {field!r}, but {_type_name(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON may escape half of a surrogate pair, which is no character
        return _BadRecord(f"has half a surrogate pair in its field {field!r}")
    return text


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
