"""Columns of text in Parquet files, read a few MiB at a time."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

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
