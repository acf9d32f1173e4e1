"""Which run a picture of the page shows, as a word inside of the PNG: the README's picture must be of the newest."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

SIGNATURE = b"\x89PNG\r\n\x1a\n"
KEYWORD = b"run\0"


def labelled(png: bytes, run: str) -> bytes:
    """The same picture, with the name of its run in a tEXt chunk after its header."""
    head, text = len(SIGNATURE) + 25, b"tEXt" + KEYWORD + run.encode("latin-1")
    chunk = (len(text) - 4).to_bytes(4) + text + zlib.crc32(text).to_bytes(4)
    return png[:head] + chunk + png[head:]


def run_of(png: bytes) -> str | None:
    """The name of its run; None where it has none."""
    found = (data.removeprefix(KEYWORD) for kind, data in _chunks(png) if kind == b"tEXt" and data.startswith(KEYWORD))
    return next((name.decode("latin-1") for name in found), None)


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """https://www.w3.org/TR/png-3/#5Chunk-layout: length, type, data, CRC."""
    at = len(SIGNATURE)
    while at < len(png):
        size = int.from_bytes(png[at : at + 4])
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        at += 12 + size
