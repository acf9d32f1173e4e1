"""The tokens of a source, and their division into sequences to train on and to hold out.

`Stream`: the tokens, document after document, read on demand. `split`: ranges of tokens to train on and ranges to hold
out, cut into sequences. A place is the index of a token in the stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .byte_tokens import BYTE_END
from .kinds import BOM
from .manifest import ANEW, TokenShard

OPEN_SHARDS = 256  # memory-mapped at once; Linux allows a process 65,530 maps
CHECKED_AT_ONCE = 1 << 20  # tokens that `ShardStream.check` reads into memory together


class Stream(Protocol):
    """The documents of a source, each with its end token, as one run of tokens."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens, including the end of each document."""
        ...

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens [start, stop)."""
        ...

    def document_ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """The ends of the documents overlapping the tokens [start, stop).

        An end is the place after a document's last token. The last of these ends is `stop` or later.
        """
        ...

    def document_start(self, position: int) -> int:
        """The place where the document of the token at `position` begins."""
        ...


class TextStream:
    """The bytes of text files, with an end token after each file."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._starts = [_bom_bytes(file) for file in files]
        sizes = [file.stat().st_size - start + 1 for file, start in zip(files, self._starts, strict=True)]
        self._ends = np.cumsum(sizes)

    @property
    def num_tokens(self) -> int:
        """The number of tokens, including the end of each document."""
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
        """The ends of the documents overlapping the tokens [start, stop); see `Stream`."""
        return _overlapping_ends(self._ends, start, stop)

    def document_start(self, position: int) -> int:
        """The place where the document of the token at `position` begins."""
        return _document_start(self._ends, position)


def _bom_bytes(file: Path) -> int:
    """The number of bytes of a file before its text."""
    with file.open("rb") as opened:
        return len(BOM) if opened.read(len(BOM)) == BOM else 0


class RecordStream:
    """Documents in memory: all tokens, and where each document ends."""

    def __init__(self, tokens: NDArray[np.unsignedinteger], ends: NDArray[np.int64]) -> None:
        self._tokens, self._ends = tokens, ends

    @property
    def num_tokens(self) -> int:
        """The number of tokens, including the end of each document."""
        return len(self._tokens)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens [start, stop)."""
        return self._tokens[start:stop].astype(np.int64)

    def document_ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """The ends of the documents overlapping the tokens [start, stop); see `Stream`."""
        return _overlapping_ends(self._ends, start, stop)

    def document_start(self, position: int) -> int:
        """The place where the document of the token at `position` begins."""
        return _document_start(self._ends, position)


class ShardStream:
    """The tokens of a prepared folder's shards, memory-mapped when read.

    vocab_size: every token is below this number.
    Reading raises ValueError where a file contradicts the manifest: if the ends of documents do not increase, or the
    last end is not the shard's number of tokens; and for a token outside the vocabulary.
    """

    def __init__(self, folder: Path, shards: Sequence[TokenShard], dtype: str, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self._shards = [shard for shard in shards if shard.tokens]
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._ends = np.cumsum([shard.tokens for shard in self._shards])
        self.map = lru_cache(maxsize=OPEN_SHARDS)(self._map_shard)  # the tokens and the documents' ends of a shard

    def check(self) -> None:
        """Read all shards, for `weft data verify` and the check when a run begins. Raises ValueError as reads do."""
        for number in range(len(self._shards)):
            tokens, _ = self.map(number)
            for start in range(0, len(tokens), CHECKED_AT_ONCE):
                self._check_tokens(number, tokens[start : start + CHECKED_AT_ONCE])

    @property
    def num_tokens(self) -> int:
        """The number of tokens, including the end of each document."""
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens [start, stop)."""
        parts = []
        for number, first in self._overlapping_shards(start, stop):
            tokens = self.map(number)[0][max(start - first, 0) : stop - first]
            self._check_tokens(number, tokens)
            parts.append(tokens.astype(np.int64))
        return np.concatenate(parts)

    def document_ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """The ends of the documents overlapping the tokens [start, stop); see `Stream`."""
        parts = []
        for number, first in self._overlapping_shards(start, stop):
            ends = self.map(number)[1]
            last = min(stop, int(self._ends[number])) - first
            parts.append(_overlapping_ends(ends, max(start - first, 0), last) + first)
        return np.concatenate(parts)

    def document_start(self, position: int) -> int:
        """The place where the document of the token at `position` begins."""
        ((number, first),) = self._overlapping_shards(position, position + 1)
        ends = self.map(number)[1]
        before = int(np.searchsorted(ends, position - first, side="right"))
        return first + (int(ends[before - 1]) if before else 0)

    def _overlapping_shards(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The shards overlapping the tokens [start, stop): their numbers, and the place of each
        shard's first token.
        """
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop - 1, side="right"))
        return [(number, int(self._ends[number - 1]) if number else 0) for number in range(first, last + 1)]

    def _map_shard(self, number: int) -> tuple[NDArray[np.unsignedinteger], NDArray[np.unsignedinteger]]:
        shard = self._shards[number]
        tokens, documents = (self._folder / name for name in shard.names[:2])
        ends = np.memmap(documents, dtype="<u8", mode="r", shape=(shard.documents,))
        if not ends[0] or ends[-1] != shard.tokens or not (ends[1:] > ends[:-1]).all():
            raise ValueError(
                f"{documents} is not what was prepared: its {shard.documents} documents do not end one after another, "
                f"the last at token {shard.tokens}; {ANEW}"
            )
        return np.memmap(tokens, dtype=self._dtype, mode="r", shape=(shard.tokens,)), ends

    def _check_tokens(self, number: int, tokens: NDArray[np.unsignedinteger]) -> None:
        if len(tokens) and (highest := int(tokens.max())) >= self._vocab_size:
            file = self._folder / self._shards[number].names[0]
            raise ValueError(
                f"{file} is not what was prepared: it has the token {highest} in a vocabulary of {self._vocab_size}; "
                f"{ANEW}"
            )


def _document_start(ends: NDArray[np.int64], position: int) -> int:
    """The place where the document of the token at `position` begins. ends: of all documents."""
    number = int(np.searchsorted(ends, position, side="right"))
    return int(ends[number - 1]) if number else 0


def _overlapping_ends(ends: NDArray[np.generic], start: int, stop: int) -> NDArray[np.int64]:
    """Of the increasing `ends`, those after `start`, up to the first at `stop` or later."""
    first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop, side="left")
    return ends[first : last + 1].astype(np.int64)


HELD_OUT_PART = 20  # one sequence in 20 is held out
HELD_OUT_MOST = 128  # at most; reading 128 sequences takes as long as a few steps
DOCUMENTS_PART = 10  # held-out documents have at most a tenth of the tokens

TokenRanges = list[tuple[int, int]]  # places (start, stop) of each range of tokens, in ascending order


class Samples:
    """The sequences that fit into ranges of tokens, numbered from 0.

    A sequence is `length` tokens of a range, and the range's next token, the target of the last. The next sequence
    begins at this next token.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], length: int) -> None:
        self._ranges = [(start, stop) for start, stop in ranges if stop - start > length]
        self._length = length
        self._ends = list(accumulate((stop - start - 1) // length for start, stop in self._ranges))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def start(self, sample: int) -> int:
        """The place of a sample's first token."""
        number = bisect_right(self._ends, sample)
        return self._ranges[number][0] + (sample - (self._ends[number - 1] if number else 0)) * self._length


@dataclass(frozen=True, slots=True)
class TrainAndHeldOut:
    """The samples for training, and the places of held-out samples."""

    trained: Samples
    held_out: list[int]  # the place of each sample's first token


def split(stream: Stream, length: int) -> TrainAndHeldOut:
    """Divide a source into samples for training and held-out samples. Called for each source of the data.

    Whole documents are held out, around evenly spaced places: one place for 20 sequences, at most 128 places. While
    these documents have more than a tenth of the tokens, the number of places is halved. If the documents around a
    single place have more than half of the tokens, evenly spaced sequences are held out instead. At most 128 held-out
    sequences become samples.
    No held-out token is trained on: no token is a target in both.
    """
    count = (stream.num_tokens - 1) // length
    assert count >= 2, "check_enough was called before"
    num_places = max(1, min(HELD_OUT_MOST, count // HELD_OUT_PART))
    ranges = _held_out_ranges(stream, length, num_places)
    if ranges is None:
        held_out = [number * length for number in even_middles(num_places, count)]
        ranges = [(start, start + length) for start in held_out]
        last = count * length
        return TrainAndHeldOut(
            Samples([(start, stop + 1) for start, stop in _complement(ranges, last)], length), held_out
        )
    samples = Samples(ranges, length)
    held_out = [samples.start(number) for number in even_middles(min(HELD_OUT_MOST, len(samples)), len(samples))]
    return TrainAndHeldOut(Samples(_complement(ranges, stream.num_tokens), length), held_out)


def _held_out_ranges(stream: Stream, length: int, num_places: int) -> TokenRanges | None:
    """Ranges of whole documents around at most `num_places` evenly spaced places.

    A range is long enough for a sequence, except at the end of the stream. Returns None if even the documents around
    a single place have too many tokens, or leave no sequence to train on.
    """
    while num_places:
        ranges: TokenRanges = []
        for place in even_middles(num_places, stream.num_tokens):
            start = stream.document_start(place)
            stop = int(stream.document_ends(start, min(start + length + 1, stream.num_tokens))[-1])
            if ranges and start < ranges[-1][1]:
                start, stop = ranges[-1][0], max(ranges.pop()[1], stop)
            ranges.append((start, stop))
        num_held_out = sum(stop - start for start, stop in ranges)
        most = stream.num_tokens // (DOCUMENTS_PART if num_places > 1 else 2)
        training = _complement(ranges, stream.num_tokens)
        if num_held_out <= most and all(
            any(stop - start > length for start, stop in each) for each in (ranges, training)
        ):
            return ranges
        num_places //= 2
    return None


def _complement(ranges: TokenRanges, stop: int) -> TokenRanges:
    """The ranges of tokens before `stop` outside of `ranges`."""
    edges = [0, *(edge for each in ranges for edge in each), stop]
    return list(zip(edges[::2], edges[1::2], strict=True))


def even_middles(number: int, count: int) -> list[int]:
    """`number` evenly spaced numbers among 0 .. count - 1: the middles of equal parts."""
    return [(2 * i + 1) * count // (2 * number) for i in range(number)]
