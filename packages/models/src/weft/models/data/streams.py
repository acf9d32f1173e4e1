"""Tokens one after another, in documents, of which what is asked for is read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .kinds import BOM
from .tokenizer import BYTE_END

OPEN_SHARDS = 256  # memory-mapped at once, of the 65,530 maps that Linux lets a process have


class Stream(Protocol):
    """The documents of a source, each with its end, as one run of tokens."""

    @property
    def num_tokens(self) -> int:
        """Ends of documents included."""
        ...

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens [start, stop)."""
        ...

    def document_ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where the documents end that hold the tokens [start, stop), each after its last token; the last at `stop` or later."""
        ...

    def document_start(self, position: int) -> int:
        """Where the document begins that holds the token at `position`."""
        ...


class TextStream:
    """The bytes of text files, and an end after each."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._starts = [_bom_bytes(file) for file in files]
        sizes = [file.stat().st_size - start + 1 for file, start in zip(files, self._starts, strict=True)]
        self._ends = np.cumsum(sizes)

    @property
    def num_tokens(self) -> int:
        """Ends of documents included."""
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens [start, stop)."""
        tokens = np.full(stop - start, BYTE_END, dtype=np.int64)
        number = int(np.searchsorted(self._ends, start, side="right"))
        place = start
        while place < stop:
            end = int(self._ends[number])
            with self._files[number].open("rb") as file:
                file.seek(self._starts[number] + place - (int(self._ends[number - 1]) if number else 0))
                content = file.read(min(stop, end - 1) - place)
            tokens[place - start : place - start + len(content)] = np.frombuffer(content, dtype=np.uint8)
            place, number = end, number + 1
        return tokens

    def document_ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where the documents end that hold the tokens [start, stop), each after its last token; the last at `stop` or later."""
        return _ends_over(self._ends, start, stop)

    def document_start(self, position: int) -> int:
        """Where the document begins that holds the token at `position`."""
        number = int(np.searchsorted(self._ends, position, side="right"))
        return int(self._ends[number - 1]) if number else 0


def _bom_bytes(file: Path) -> int:
    """Bytes of a file before its text."""
    with file.open("rb") as opened:
        return len(BOM) if opened.read(len(BOM)) == BOM else 0


class RecordStream:
    """Documents in memory: their tokens, and where each ends."""

    def __init__(self, tokens: NDArray[np.unsignedinteger], ends: NDArray[np.int64]) -> None:
        self._tokens, self._ends = tokens, ends

    @property
    def num_tokens(self) -> int:
        """Ends of documents included."""
        return len(self._tokens)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens [start, stop)."""
        return self._tokens[start:stop].astype(np.int64)

    def document_ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where the documents end that hold the tokens [start, stop), each after its last token; the last at `stop` or later."""
        return _ends_over(self._ends, start, stop)

    def document_start(self, position: int) -> int:
        """Where the document begins that holds the token at `position`."""
        number = int(np.searchsorted(self._ends, position, side="right"))
        return int(self._ends[number - 1]) if number else 0


class ShardStream:
    """The tokens of a prepared folder's shards, memory-mapped where they are read.

    shards: of each, the file of its tokens, that of its documents' ends, and how many there are of both.
    """

    def __init__(self, shards: Sequence[tuple[Path, Path, int, int]], dtype: str) -> None:
        self._shards = [shard for shard in shards if shard[2]]
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._ends = np.cumsum([tokens for _, _, tokens, _ in self._shards])
        self._map = lru_cache(maxsize=OPEN_SHARDS)(self._mapped)

    @property
    def num_tokens(self) -> int:
        """Ends of documents included."""
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens [start, stop)."""
        parts = []
        for number, first in self._over(start, stop):
            tokens = self._map(number)[0]
            parts.append(tokens[max(start - first, 0) : stop - first].astype(np.int64))
        return np.concatenate(parts)

    def document_ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where the documents end that hold the tokens [start, stop), each after its last token; the last at `stop` or later."""
        parts = []
        for number, first in self._over(start, stop):
            ends = self._map(number)[1]
            last = min(stop, int(self._ends[number])) - first
            parts.append(_ends_over(ends, max(start - first, 0), last) + first)
        return np.concatenate(parts)

    def document_start(self, position: int) -> int:
        """Where the document begins that holds the token at `position`."""
        ((number, first),) = self._over(position, position + 1)
        ends = self._map(number)[1]
        before = int(np.searchsorted(ends, position - first, side="right"))
        return first + (int(ends[before - 1]) if before else 0)

    def _over(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The shards that hold the tokens [start, stop), and where each begins."""
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop - 1, side="right"))
        return [(number, int(self._ends[number - 1]) if number else 0) for number in range(first, last + 1)]

    def _mapped(self, number: int) -> tuple[NDArray[np.unsignedinteger], NDArray[np.unsignedinteger]]:
        tokens, documents, num_tokens, num_documents = self._shards[number]
        return (
            np.memmap(tokens, dtype=self._dtype, mode="r", shape=(num_tokens,)),
            np.memmap(documents, dtype="<u8", mode="r", shape=(num_documents,)),
        )


def _ends_over(ends: NDArray[np.generic], start: int, stop: int) -> NDArray[np.int64]:
    """Of the increasing `ends`, those after `start`, up to the first that is not before `stop`."""
    first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop, side="left")
    return ends[first : last + 1].astype(np.int64)
