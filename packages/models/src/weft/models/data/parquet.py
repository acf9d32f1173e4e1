"""Columns and whole rows of Parquet files, by row groups. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROWS_AT_ONCE = 256
BYTES_AT_ONCE = 8 << 20
AS_CODES = 32 << 20  # row groups up to this number of bytes are read as codes and a table of values


def column_names(file: Path) -> list[str]:
    """The names of a file's columns. Raises ValueError for a damaged file."""
    names: list[str] = _open(file).schema_arrow.names
    return names


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
    return group_sizes(file)


def group_sizes(file: Path) -> list[int]:
    """The bytes of each row group, of all columns together. Raises ValueError for a damaged file."""
    opened = _open(file)
    return [_group_bytes(opened, group) for group in range(opened.metadata.num_row_groups)]


def read_column(file: Path, column: str, groups: Sequence[int]) -> Iterator[str | None]:
    """The texts of a column in some row groups; None for a null. Raises ValueError for a damaged file.

    Many rows may share a value of the file, and a file of a few hundred bytes can have rows of gigabytes. A small
    row group is therefore read as codes, with each value in memory once; a larger row group is read in batches of
    about BYTES_AT_ONCE.
    """
    try:
        for group in groups:
            opened = _open(file)
            if _group_bytes(opened, group) <= AS_CODES:
                opened = _open(file, read_dictionary=[column])
            for batch in opened.iter_batches(_batch_rows(opened, group), row_groups=[group], columns=[column]):
                yield from (value.as_py() for value in batch.column(0))
    except _damages() as error:
        raise _damaged(file, error) from None


def read_rows(file: Path, columns: Collection[str], groups: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of some row groups: each row's number in the file, from 1, and its values by the names of columns.

    columns: the columns to read; columns missing in the file are left out. Nulls are left out, in structs at any
        depth, too: all structs of a column have the same fields, and null stands for a field without a value.
    Raises ValueError for a damaged file.
    """
    try:
        opened = _open(file)
        names = [name for name in opened.schema_arrow.names if name in columns]
        for group in groups:
            number = sum(opened.metadata.row_group(before).num_rows for before in range(group))
            for batch in opened.iter_batches(_batch_rows(opened, group), row_groups=[group], columns=names):
                for row in range(batch.num_rows):
                    number += 1
                    yield number, _without_nulls({name: batch.column(name)[row].as_py() for name in names})
    except _damages() as error:
        raise _damaged(file, error) from None


def _without_nulls(value: Any) -> Any:
    """A value of nested lists and structs without the structs' fields that are null."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _open(file: Path, **options: Any) -> Any:
    try:
        return import_module("pyarrow.parquet").ParquetFile(file, memory_map=True, **options)
    except _damages() as error:
        raise ValueError(f"{file} is not a Parquet file: {' '.join(str(error).split())}; save it again") from None


def _damages() -> tuple[type[Exception], ...]:
    """The errors raised for a damaged file: by the system, by decoding, and the base class of all pyarrow errors."""
    arrow: type[Exception] = import_module("pyarrow").ArrowException
    return arrow, ValueError, OSError


def _damaged(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} cannot be read: {' '.join(str(error).split())}; save it again")


def _batch_rows(opened: Any, group: int) -> int:
    """The rows of a row group to read at once: about BYTES_AT_ONCE, at most ROWS_AT_ONCE rows."""
    nbytes, rows = _group_bytes(opened, group), max(opened.metadata.row_group(group).num_rows, 1)
    return int(min(max(BYTES_AT_ONCE * rows // max(nbytes, 1), 1), ROWS_AT_ONCE))


def _group_bytes(opened: Any, group: int) -> int:
    """The unpacked bytes of a row group's pages, of all columns together; rows may share a value.

    `RowGroupMetaData.column` would give the bytes of a column alone, and aborts the process for damaged statistics.
    """
    return int(opened.metadata.row_group(group).total_byte_size)
