"""Finds the kind of a file of documents by suffix, or by the first bytes if the suffix is unknown."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum
from pathlib import Path

BOM = b"\xef\xbb\xbf"  # the byte order mark of UTF-8, not part of a text
HEAD_BYTES = 8192
LINES_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet", ".pq")
TABLE_DELIMITERS = {".csv": ",", ".tsv": "\t"}
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".log")  # text, even text in the form of JSON
# The first bytes of files without text in UTF-8, the format, and the remedy.
_UNPACK = "unpack the file first"
_MAGIC = (
    (b"PAR1", "a Parquet file", "name it .parquet"),
    (b"\x1f\x8b", "compressed by gzip", _UNPACK),
    (b"BZh", "compressed by bzip2", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", _UNPACK),
    (b"\xfd7zXZ\x00", "compressed by xz", _UNPACK),
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"%PDF-", "a PDF", "make text of it first"),
    (b"ARROW1", "an Arrow file", "save it as Parquet"),
    (b"\xff\xfe", "text in UTF-16 or UTF-32", "convert it to UTF-8"),
    (b"\xfe\xff", "text in UTF-16", "convert it to UTF-8"),
    (b"\x00\x00\xfe\xff", "text in UTF-32", "convert it to UTF-8"),
)


class FileKind(Enum):
    """How the documents of a file are read."""

    TEXT = "text"  # the file is a document
    LINES = "lines"  # of JSON: each line an object
    LIST = "list"  # of JSON: one list of objects
    TABLE = "table"  # rows of values, below a row of names
    PARQUET = "parquet"
    NONE = "none"  # not text


def kind_of(file: Path, fields: Collection[str], *, is_named: bool) -> FileKind:
    """The kind of a file, by its suffix in any capitals: JSON lines, JSON, CSV, TSV, Parquet, plain text.

    A file of another suffix is text, unless the first bytes are those of a binary format or of JSON.
    fields: the fields of records, such as the field with the text. An object alone in a file is a record if the object
        has one of these fields.
    is_named: whether the caller named the file; otherwise the file is in a named folder. In a folder, a file without
        text is `FileKind.NONE`, and an object without these fields, such as a program's settings, is text.
    Raises ValueError for a named file without text or records, and for records of JSON under the suffix of another
    kind.
    """
    suffix = file.suffix.lower()
    if suffix in PARQUET_SUFFIXES:
        return FileKind.PARQUET
    with file.open("rb") as opened:
        head = opened.read(HEAD_BYTES)
    has_known_suffix = suffix in LINES_SUFFIXES or suffix in TABLE_DELIMITERS
    if (format_and_remedy := _not_text(head)) is not None:
        if is_named or has_known_suffix:
            format_name, remedy = format_and_remedy
            raise ValueError(f"{file} is {format_name}, not text in UTF-8; {remedy}")
        return FileKind.NONE
    if has_known_suffix:
        return FileKind.LINES if suffix in LINES_SUFFIXES else FileKind.TABLE
    if suffix in TEXT_SUFFIXES:
        return FileKind.TEXT
    records, is_json = _records(file, fields)
    if suffix == ".json" and records is not None:
        return records
    if records is not None or (is_named and (is_json or (suffix == ".json" and head.strip()))):
        if suffix == ".json":
            raise ValueError(
                f"{file} holds no records: neither a list of objects nor an object in each line; convert the file to "
                f"either form, or name it .txt to train on the JSON as text"
            )
        raise ValueError(
            f"{file} holds JSON, but has the suffix {file.suffix!r}; name it .jsonl if each line is an object, .json "
            f"if the file is a list of objects, or .txt to train on the JSON as text"
        )
    return FileKind.TEXT


def _not_text(head: bytes) -> tuple[str, str] | None:
    """For a file without text, by the first bytes: the format, and the remedy. None for text."""
    for magic, format_name, remedy in _MAGIC:
        if head.startswith(magic):
            return format_name, remedy
    if b"\x00" in head:
        return f"binary (byte {head.index(0)} is 0)", "give files of text"
    return None


def _records(file: Path, fields: Collection[str]) -> tuple[FileKind | None, bool]:
    """The kind of a file with records of JSON, or None; and whether the file begins as JSON does."""
    with file.open("rb") as opened:
        head = opened.read(HEAD_BYTES).removeprefix(BOM).lstrip()
        if re.match(rb'\[\s*\{\s*["}]', head):
            return FileKind.LIST, True
        if re.match(rb'\[\s*"', head):
            return None, True
        if not re.match(rb'\{\s*["}]', head):
            return None, False
        opened.seek(0)
        first, second = _line(opened), _line(opened)
    try:
        record = json.loads(first.removeprefix(BOM))
    except (ValueError, RecursionError):  # an object of several lines, or none
        return None, True
    return (
        FileKind.LINES if second.startswith(b"{") or (not second and any(field in record for field in fields)) else None
    ), True


def _line(opened: object) -> bytes:
    """The next line with text; empty at the end of the file."""
    for line in opened:  # type: ignore[attr-defined]
        if line.removeprefix(BOM).strip():
            return bytes(line.lstrip())
    return b""
