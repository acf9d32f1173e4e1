"""What is trained on and what is held out: runs of tokens, cut into sequences."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .streams import Stream

HELD_OUT_PART = 20  # one sequence of so many is held out,
HELD_OUT_MOST = 128  # but no more than these: to read them takes as long as a few steps
DOCUMENTS_PART = 10  # documents that are held out are no more of the tokens than one in so many

Runs = list[tuple[int, int]]


class Samples:
    """The sequences of some runs of tokens: each of `length` tokens and the next one, within one run."""

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
    """The samples that are trained on, and the places of those that are held out."""

    trained: Samples
    held_out: list[int]


def split(stream: Stream, length: int) -> Split:
    """Holds out whole documents, evenly spaced through the tokens: one sequence in 20, at most 128.

    Where documents are so few or so long that this would hold out a tenth of the tokens, it is fewer of them; where even one
    place would hold out half of the tokens, it is sequences, evenly spaced. Nothing that is held out is trained on.
    """
    count = (stream.num_tokens - 1) // length
    assert count >= 2, "what reads the corpus has checked that"
    wanted = max(1, min(HELD_OUT_MOST, count // HELD_OUT_PART))
    runs = _documents(stream, length, wanted)
    if runs is None:
        held_out = [number * length for number in _evenly(wanted, count)]
        runs = [(start, start + length) for start in held_out]
        last = count * length
        return Split(Samples([(start, stop + 1) for start, stop in _between(runs, last)], length), held_out)
    samples = Samples(runs, length)
    held_out = [samples.start(number) for number in _evenly(min(HELD_OUT_MOST, len(samples)), len(samples))]
    return Split(Samples(_between(runs, stream.num_tokens), length), held_out)


def _documents(stream: Stream, length: int, wanted: int) -> Runs | None:
    """Runs of whole documents, each of a sequence or more, around evenly spaced tokens; None where they hold too much."""
    while wanted:
        runs: Runs = []
        for place in _evenly(wanted, stream.num_tokens):
            start = stream.document_start(place)
            stop = int(stream.document_ends(start, min(start + length + 1, stream.num_tokens))[-1])
            if runs and start < runs[-1][1]:
                start, stop = runs[-1][0], max(runs.pop()[1], stop)
            runs.append((start, stop))
        held = sum(stop - start for start, stop in runs)
        most = stream.num_tokens // (DOCUMENTS_PART if wanted > 1 else 2)
        kept = _between(runs, stream.num_tokens)
        if held <= most and all(any(stop - start > length for start, stop in each) for each in (runs, kept)):
            return runs
        wanted //= 2
    return None


def _between(runs: Runs, stop: int) -> Runs:
    """The tokens before `stop` that are in none of the runs."""
    edges = [0, *(edge for run in runs for edge in run), stop]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _evenly(number: int, count: int) -> list[int]:
    """The middles of `number` even parts of 0 .. count - 1."""
    return [(2 * i + 1) * count // (2 * number) for i in range(number)]
