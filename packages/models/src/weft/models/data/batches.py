"""Batches of a run's data, in an order independent of meshes, workers and restarts.

`Batches` gives the rows of any step. `Prefetch` reads the next step's batch while the current step is computed. The
order is a permutation by a key, with turns of several sources; no list of samples is stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from weft.mesh import derive_key

from .sources import Data, Mixture, check_enough
from .streams import Stream, split

# Rounds of the Feistel network; four rounds with pseudorandom functions give a pseudorandom permutation (Luby, Rackoff
# 1988).
ROUNDS = 6
ALL = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio, the increment of SplitMix64
MOST_TURNS = 100_000  # of a period; all turns of the period are computed within a second


def permute(place: int, count: int, key: int) -> int:
    """The image of `place` under a permutation of 0 .. count - 1 determined by the 64-bit key.

    A Feistel network permutes the numbers below a power of 4. An image of `count` or more goes through the network
    again until the image is below `count` (cycle-walking, Black and Rogaway 2002): on average at most four times.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mix(right ^ (key + number * GOLDEN) & ALL) & mask)
        place = (left << half) | right
        if place < count:
            return place


def _mix(value: int) -> int:
    """A hash of 64 bits in which each bit depends on every bit of `value` (the finalizer of SplitMix64, Steele et
    al. 2014).
    """
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & ALL
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & ALL
    return value ^ (value >> 31)


class SourceTurns:
    """The source of each sample, by weight: of the first n samples, source s has n * share(s), rounded down or up, for
    every n.

    A source's share is the source's weight over the sum of the weights. The turns repeat with the shares' common
    denominator. Of the sources not ahead of their share, the next is the source whose turn is due first (Baruah et al.
    1996, proportionate progress).
    Raises ValueError for weights that repeat after more than MOST_TURNS samples.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        total = sum(weights, Fraction(0))
        shares = [weight / total for weight in weights]
        self._period = lcm(*(share.denominator for share in shares))
        if self._period > MOST_TURNS:
            raise ValueError(
                f"the weights {', '.join(map(str, weights))} repeat after {self._period} samples, above {MOST_TURNS}; "
                f"give weights of fewer digits"
            )
        self._of_period = [int(share * self._period) for share in shares]
        self._sources, self._numbers = _turns(tuple(self._of_period))

    def __call__(self, sample: int) -> tuple[int, int]:
        """The source of a sample, and the number of earlier samples from this source."""
        periods, turn = divmod(sample, self._period)
        source = int(self._sources[turn])
        return source, periods * self._of_period[source] + int(self._numbers[turn])


@lru_cache(maxsize=4)
def _turns(of_period: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each turn of a period: the source, and the number of earlier turns of this source.

    of_period: the number of turns of each source in a period.
    """
    period = sum(of_period)
    num_drawn = [0] * len(of_period)
    sources, numbers = np.empty(period, dtype=np.int64), np.empty(period, dtype=np.int64)
    for turn in range(period):
        released = [
            s for s, count in enumerate(of_period) if num_drawn[s] < count and num_drawn[s] * period // count <= turn
        ]
        source = min(released, key=lambda s: -(-(num_drawn[s] + 1) * period // of_period[s]))
        sources[turn], numbers[turn] = source, num_drawn[source]
        num_drawn[source] += 1
    return sources, numbers


class Order:
    """The order of a run's training samples: every epoch visits each sample of a source once.

    The order in an epoch follows from the key ("order", source, epoch) of the seed. Each source of a mixture has epochs
    of its own; `SourceTurns` says which source comes next.
    weights, counts: by source, the weight and the number of training samples.
    Raises ValueError as `SourceTurns` does.
    """

    def __init__(self, weights: Sequence[Fraction], counts: Sequence[int], seed: int) -> None:
        self._turns = SourceTurns(weights)
        self._counts, self._seed = counts, seed

    def __call__(self, sample: int) -> tuple[int, int]:
        """The source of a sample, and the number of the sample within the source.

        sample: numbered over the whole run.
        """
        source, number = self._turns(sample)
        count = self._counts[source]
        epoch, number = divmod(number, count)
        return source, permute(number, count, derive_key(self._seed, "order", source, epoch))


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Some rows of a batch. Made by `Batches`; `ExampleBatches` makes the subclass `TaskRows`."""

    tokens: Tensor  # [rows, T] int64
    targets: Tensor  # [rows, T] int64; -100 where a token is no target
    # Of packed rows, [rows, T] int64; else None. Positions count from 0 at each document's start; in a document that
    # began before the row, from the row's start. Documents are numbered along a row.
    positions: Tensor | None
    documents: Tensor | None

    def named(self) -> dict[str, Tensor]:
        """The tensors of `Rows` by name: arguments of `lay_out_batch`, or of a model.

        Without fields that are None, and without the fields of a subclass.
        """
        fields = {name: getattr(self, name) for name in Rows.__dataclass_fields__}
        return {name: each for name, each in fields.items() if each is not None}


class Batches:
    """The sequences of a run's texts: training samples, in an order that depends on (seed, step) alone, and held-out
    samples.

    A sample is T consecutive tokens; the target of each token is the next token. `split` chooses the held-out samples,
    the same for every seed; the remaining samples come in the `Order` of the seed. To go on, a resumed run needs only
    the step's number.
    packed: tokens attend within their document only, and each document's positions begin at 0.
    Raises ValueError as `check_enough` does, and as `SourceTurns` does for the weights.
    """

    def __init__(self, data: Data, *, sequence_length: int, batch_size: int, seed: int, packed: bool = False) -> None:
        check_enough(data, sequence_length)
        parts = data.parts if isinstance(data, Mixture) else ((data, Fraction(1)),)
        self._streams = [source.open() for source, _ in parts]
        self._splits = [split(stream, sequence_length) for stream in self._streams]
        self._order = Order([weight for _, weight in parts], [len(each.trained) for each in self._splits], seed)
        self._held_out = [(number, start) for number, each in enumerate(self._splits) for start in each.held_out]
        self._length = sequence_length
        self._batch_size = batch_size
        self._packed = packed

    @property
    def num_samples(self) -> int:
        """The number of training samples of all sources together, an epoch of each."""
        return sum(len(each.trained) for each in self._splits)

    @property
    def num_held_out(self) -> int:
        """The number of held-out samples."""
        return len(self._held_out)

    def batch(self, step: int, rows: slice) -> Rows:
        """These rows of the global batch of `step`; only these rows are read."""
        first = step * self._batch_size
        return self._read([self._locate(first + row) for row in range(*rows.indices(self._batch_size))])

    def held_out(self, rows: slice) -> Rows:
        """These rows of all held-out samples."""
        return self._read(self._held_out[rows])

    def _locate(self, sample: int) -> tuple[int, int]:
        """The source of a training sample, and the place of the sample's first token in the source.

        sample: numbered over the whole run.
        """
        source, number = self._order(sample)
        return source, self._splits[source].trained.start(number)

    def _read(self, places: Sequence[tuple[int, int]]) -> Rows:
        T = self._length
        windows = np.empty((len(places), T + 1), dtype=np.int64)
        for row, (source, start) in enumerate(places):
            windows[row] = self._streams[source].read(start, start + T + 1)
        tokens, targets = torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())
        if not self._packed:
            return Rows(tokens=tokens, targets=targets, positions=None, documents=None)
        documents = np.zeros((len(places), T), dtype=np.int64)
        positions = np.empty((len(places), T), dtype=np.int64)
        for row, (source, start) in enumerate(places):
            starts = _document_starts(self._streams[source], start, T)
            documents[row, starts[1:]] = 1
            positions[row] = np.arange(T) - np.repeat(starts, np.diff(starts, append=T))
        return Rows(
            tokens=tokens,
            targets=targets,
            positions=torch.from_numpy(positions),
            documents=torch.from_numpy(documents.cumsum(1)),
        )


def _document_starts(stream: Stream, start: int, length: int) -> NDArray[np.int64]:
    """Where documents begin within `length` tokens from `start` on, relative to `start`; 0 for the document that
    `start` is in.
    """
    ends = stream.document_ends(start, start + length) - start
    return np.concatenate(([0], ends[ends < length]))


class Prefetch(Generic[T]):
    """Calls `read(step)` in a thread, a step ahead of the caller; a step asked for out of order is read at once.

    Errors of `read` are raised when the caller asks for the step.
    """

    def __init__(self, read: Callable[[int], T]) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-data")
        self._next: tuple[int, Future[T]] | None = None
        self.waited = 0.0  # seconds that the caller has waited; the caller resets them to 0

    def begin(self, step: int) -> None:
        """Start the thread, and begin to read `step`, the next to be asked for."""
        self._next = (step, self._thread.submit(self._read, step))

    def __call__(self, step: int) -> T:
        """The result of `read` for the step; begins to read the next step."""
        start = time.perf_counter()
        if self._next is not None and self._next[0] == step:
            result = self._next[1].result()
        else:
            result = self._read(step)
        self.begin(step + 1)
        self.waited += time.perf_counter() - start
        return result
