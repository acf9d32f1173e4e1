"""Texts to prepare, in files of every kind, and the files of a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

TEXTS = [f"{'chapter ' * (n % 5)}{n}: wärp and weft ☃\n" for n in range(20)]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path there."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def write_text(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def write_jsonl(folder: Path, texts: list[str], field: str = "text", **others: str) -> Path:
    file = folder.with_suffix(".jsonl")
    file.write_text(
        "".join(
            json.dumps({"number": n, **others, field: text}, ensure_ascii=bool(n % 2)) + "\n"
            for n, text in enumerate(texts)
        )
    )
    return file


def write_parquet(folder: Path, texts: list[str], column: str = "text", **others: str) -> Path:
    file, count = folder.with_suffix(".parquet"), len(texts)
    columns = {"n": list(range(count)), **{name: [value] * count for name, value in others.items()}, column: texts}
    pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=7)
    return file
