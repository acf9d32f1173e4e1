"""Divides the tokens of a source into ranges to train on and ranges to hold out, and cuts the ranges into sequences.

A place is the index of a token in the stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .streams import Stream

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
