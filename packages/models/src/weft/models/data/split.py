"""Which tokens are trained on, and which are held out: runs of tokens, cut into sequences."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .streams import Stream

HELD_OUT_PART = 20  # one sequence in 20 is held out
HELD_OUT_MOST = 128  # at most; reading 128 sequences takes as long as a few steps
DOCUMENTS_PART = 10  # held-out documents have at most a tenth of the tokens

Runs = list[tuple[int, int]]


class Samples:
    """The sequences within runs of tokens: `length` tokens and the next token, all within one run."""

    def __init__(self, runs: Sequence[tuple[int, int]], length: int) -> None:
        self._runs = [run for run in runs if run[1] - run[0] > length]
        self._length = length
        self._ends = list(accumulate((stop - start - 1) // length for start, stop in self._runs))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def start(self, sample: int) -> int:
        """The place of a sample's first token."""
        run = bisect_right(self._ends, sample)
        return self._runs[run][0] + (sample - (self._ends[run - 1] if run else 0)) * self._length


@dataclass(frozen=True, slots=True)
class Split:
    """The samples for training, and the places of held-out samples."""

    trained: Samples
    held_out: list[int]  # the place of each sample's first token


def split(stream: Stream, length: int) -> Split:
    """Hold out whole documents, evenly spaced through the tokens: a sequence in 20, at most 128.

    Where documents are so few or so long that this would hold out more than a tenth of the tokens, fewer documents
    are held out. Where even a single place would hold out more than half of the tokens, evenly spaced sequences are
    held out instead. Nothing held out is trained on: no token is a target in both.
    """
    count = (stream.num_tokens - 1) // length
    assert count >= 2, "check_enough was called before"
    num_places = max(1, min(HELD_OUT_MOST, count // HELD_OUT_PART))
    runs = _held_out_runs(stream, length, num_places)
    if runs is None:
        held_out = [number * length for number in _even_middles(num_places, count)]
        runs = [(start, start + length) for start in held_out]
        last = count * length
        return Split(Samples([(start, stop + 1) for start, stop in _complement(runs, last)], length), held_out)
    samples = Samples(runs, length)
    held_out = [samples.start(number) for number in _even_middles(min(HELD_OUT_MOST, len(samples)), len(samples))]
    return Split(Samples(_complement(runs, stream.num_tokens), length), held_out)


def _held_out_runs(stream: Stream, length: int, num_places: int) -> Runs | None:
    """Runs of whole documents around evenly spaced tokens, each run longer than a sequence; None if the runs hold
    too much.
    """
    while num_places:
        runs: Runs = []
        for place in _even_middles(num_places, stream.num_tokens):
            start = stream.document_start(place)
            stop = int(stream.document_ends(start, min(start + length + 1, stream.num_tokens))[-1])
            if runs and start < runs[-1][1]:
                start, stop = runs[-1][0], max(runs.pop()[1], stop)
            runs.append((start, stop))
        num_held_out = sum(stop - start for start, stop in runs)
        most = stream.num_tokens // (DOCUMENTS_PART if num_places > 1 else 2)
        training_runs = _complement(runs, stream.num_tokens)
        if num_held_out <= most and all(
            any(stop - start > length for start, stop in each) for each in (runs, training_runs)
        ):
            return runs
        num_places //= 2
    return None


def _complement(runs: Runs, stop: int) -> Runs:
    """The runs of tokens before `stop` outside of `runs`."""
    edges = [0, *(edge for run in runs for edge in run), stop]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _even_middles(number: int, count: int) -> list[int]:
    """The middles of `number` even parts of 0 .. count - 1."""
    return [(2 * i + 1) * count // (2 * number) for i in range(number)]
