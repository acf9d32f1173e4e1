"""Documents in files: text, JSONL and Parquet, in parts that can be read apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..terminal import install_command
from .text import files_under

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet", ".pq")
ROWS_AT_ONCE = 1024  # of a Parquet file


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some documents of a file.

    start, stop: of JSONL, the lines that begin at these bytes; of Parquet, the row groups; of text, the whole file, a document.
    given: whether the file was named itself, so that it may not be skipped. nbytes: about what is read.
    """

    path: Path
    start: int
    stop: int
    given: bool
    nbytes: int


Part = tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where the text stands. field: of a line of JSONL. column: of a Parquet file. skip_bad: leave out lines without it."""

    field: str = "text"
    column: str = "text"
    skip_bad: bool = False


@dataclass(slots=True)
class LeftOut:
    """What was read and is no document."""

    empty: int
    skipped: list[str]
    bad: int


def find_parts(
    inputs: Sequence[Path], columns: Columns, part_bytes: int, *, leave_out: Path | None = None
) -> list[Part]:
    """The documents under `inputs`, in order, in parts of about `part_bytes` each; a function of the files alone.

    Small files share a part; JSONL is cut between lines, Parquet between row groups, text nowhere.
    leave_out: a folder that is none of the inputs, where it lies within one of them.
    Raises ValueError for a path that is missing, a Parquet file that is none or has not the column, and where all is empty.
    """
    parts: list[list[Piece]] = [[]]
    held = 0
    for path in inputs:
        if not path.exists():
            raise ValueError(f"{path} does not exist; give files, or folders of them: text, JSONL or Parquet")
        for file in files_under(path, leave_out):
            for piece in _pieces(file, path.is_file(), columns, part_bytes):
                if parts[-1] and held + piece.nbytes > part_bytes:
                    parts.append([])
                    held = 0
                parts[-1].append(piece)
                held += piece.nbytes
    if not any(piece.nbytes for part in parts for piece in part):
        raise ValueError(f"{', '.join(map(str, inputs))} hold no text; give files that do, or folders of them")
    return [tuple(part) for part in parts]


def _pieces(file: Path, given: bool, columns: Columns, part_bytes: int) -> Iterator[Piece]:
    size = file.stat().st_size
    if file.suffix in PARQUET_SUFFIXES:
        groups = _row_groups(file, columns.column)
        yield from (Piece(path=file, start=i, stop=i + 1, given=given, nbytes=n) for i, n in enumerate(groups))
    elif file.suffix in JSONL_SUFFIXES:
        for start in range(0, size, part_bytes):
            stop = min(start + part_bytes, size)
            yield Piece(path=file, start=start, stop=stop, given=given, nbytes=stop - start)
    else:
        yield Piece(path=file, start=0, stop=size, given=given, nbytes=size)


def read_part(part: Part, columns: Columns, left_out: LeftOut) -> Iterator[str]:
    """The texts of a part's documents, none of them empty; `left_out` counts what is none.

    Raises ValueError for a file that was named itself and is not UTF-8, a line that is no JSON object in UTF-8 or has not
    the field, unless skip_bad, and a column that holds no text.
    """
    for piece in part:
        if piece.path.suffix in PARQUET_SUFFIXES:
            found = _read_parquet(piece, columns)
        elif piece.path.suffix in JSONL_SUFFIXES:
            found = _read_lines(piece, columns, left_out)
        else:
            found = _read_text(piece, left_out)
        for text in found:
            if text:
                yield text
            else:
                left_out.empty += 1


def _read_text(piece: Piece, left_out: LeftOut) -> Iterator[str]:
    try:
        yield piece.path.read_bytes().decode()
    except UnicodeDecodeError as error:
        if piece.given:
            raise ValueError(f"{piece.path} is not UTF-8 text (byte {error.start} of the file); convert it") from None
        left_out.skipped.append(str(piece.path))


def _read_lines(piece: Piece, columns: Columns, left_out: LeftOut) -> Iterator[str]:
    with piece.path.open("rb") as file:
        if piece.start:  # the line that lies across belongs to the piece before
            file.seek(piece.start - 1)
            file.readline()
        while (place := file.tell()) < piece.stop and (line := file.readline()):
            text = _text_of(line, columns.field)
            if isinstance(text, str):
                yield text
            elif columns.skip_bad:
                left_out.bad += 1
            else:
                raise ValueError(
                    f"{piece.path}: the line at byte {place} {text.said}; mend it, or leave such out with --skip-bad"
                )


@dataclass(frozen=True, slots=True)
class _Bad:
    said: str


def _text_of(line: bytes, field: str) -> str | _Bad:
    if not line.strip():
        return ""
    try:
        found = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return _Bad(f"is not UTF-8 (its byte {error.start})")
    except (ValueError, RecursionError):
        return _Bad("is not JSON")
    if not isinstance(found, dict) or field not in found:
        return _Bad(f"has no field {field!r}")
    text = found[field]
    if not isinstance(text, str):
        return _Bad(f"has no text in its field {field!r}, but {'null' if text is None else type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON may escape half of a surrogate pair, which is no character
        return _Bad(f"has half a surrogate pair in its field {field!r}")
    return text


def _open_parquet(file: Path) -> Any:
    if find_spec("pyarrow") is None:
        raise ValueError(f"pyarrow is not installed, which reads {file}; {install_command('pyarrow')}")
    try:
        return import_module("pyarrow.parquet").ParquetFile(file, memory_map=True)
    except ValueError as error:  # as pyarrow's own error is
        raise ValueError(f"{file} is not a Parquet file: {' '.join(str(error).split())}; save it again") from None


def _row_groups(file: Path, column: str) -> list[int]:
    """The bytes of each row group, in the one column."""
    opened = _open_parquet(file)
    names = opened.schema_arrow.names
    if column not in names:
        raise ValueError(f"{file} has no column {column!r}; give one of {', '.join(names)} with --column")
    kind = str(opened.schema_arrow.field(column).type)
    if kind not in ("string", "large_string", "string_view"):
        raise ValueError(f"{file}: column {column!r} is {kind}, not text; give another with --column")
    metadata = opened.metadata
    place = (
        [metadata.row_group(0).column(i).path_in_schema for i in range(metadata.num_columns)].index(column)
        if metadata.num_row_groups
        else 0
    )
    return [metadata.row_group(i).column(place).total_uncompressed_size for i in range(metadata.num_row_groups)]


def _read_parquet(piece: Piece, columns: Columns) -> Iterator[str]:
    opened = _open_parquet(piece.path)
    groups = list(range(piece.start, piece.stop))
    try:
        for batch in opened.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=[columns.column]):
            yield from ("" if text is None else text for text in batch.column(0).to_pylist())
    except (ValueError, OSError) as error:
        raise ValueError(f"{piece.path} cannot be read: {' '.join(str(error).split())}; save it again") from None
