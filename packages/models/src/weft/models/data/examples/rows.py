"""Rows of examples for fine-tuning: which examples share a row, and the tokens, targets and documents of the rows.

`pack` places examples into rows. `ExampleBatches` gives the rows of any step, as `Batches` of data/batches.py does for
pretraining.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batches import Order, Rows
from ..sources import Mixture
from ..streams import HELD_OUT_MOST, HELD_OUT_PART, even_middles
from ..tokenizer import Tokenizer
from .example import Example, MaskedTokens, Task

NOT_LEARNED = -100  # the target of a place where nothing is learned; the losses ignore it


class ExampleSource(Protocol):
    """The examples of a file or folder, cut to the sequence length; in a run, `Examples` of source.py."""

    @property
    def task(self) -> Task: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def lengths(self) -> NDArray[np.int64]: ...  # [n, segments]: the tokens of each segment
    @property
    def learned(
        self,
    ) -> NDArray[np.int64]: ...  # [n, segments]: the targets of each segment, without the first token
    @property
    def labels(self) -> NDArray[np.bool_]: ...  # [n]: of kto, whether a completion is desirable; else False
    def read(self, number: int) -> Example:
        """The example with this number, 0 to n - 1."""
        ...


class _Packing:
    """Which examples each row holds. `ExampleBatches` makes a Packing from the result of `pack`."""

    def __init__(self, row_of: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """row_of, numbers: [n] each. Example `numbers[i]` is in row `row_of[i]`; rows count from 0 without gaps."""
        self._numbers = numbers[np.argsort(row_of, kind="stable")]
        self._starts = np.concatenate(([0], np.cumsum(np.bincount(row_of)))).astype(np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        """The numbers of a row's examples, in ascending order."""
        return self._numbers[self._starts[row] : self._starts[row + 1]]

    @property
    def most(self) -> int:
        """The most examples in a row; 0 without rows."""
        return int(np.diff(self._starts).max(initial=0))


def pack(lengths: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Assign each example to a row: [n], 0 to the number of rows - 1. A row has `width` places.

    Best-fit decreasing (Johnson 1973): from the longest example to the shortest, each goes into the row with the
    fewest free places where the example fits, or into a new row; ties by number. All examples of a length are placed
    together, into rows listed by free places: n examples take O(n log n) time, and each search for a row scans
    width / 64 machine words.
    lengths: [n], the places that each example takes.
    Raises ValueError for a length below 1 or above `width`.
    """
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= width:
        raise ValueError(f"examples have {lengths.min()} to {lengths.max()} places, and a row has {width}")
    order = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    rows_by_free: dict[int, list[int]] = {}  # the rows with a number of free places
    frees = 0  # a set of bits: bit f is set if a row has f free places
    num_rows = 0
    rows: list[int] = []  # of the examples in `order`
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            fitting = frees >> size
            free = size + (fitting & -fitting).bit_length() - 1 if fitting else width
            each = free // size  # how many examples of this size fit into a row with `free` places
            needed = -(-count // each)
            if fitting:
                bucket = rows_by_free[free]
                chosen = bucket[-needed:]
                del bucket[-needed:]
                if not bucket:
                    frees ^= 1 << free
            else:
                chosen = list(range(num_rows, num_rows + needed))
                num_rows += needed
            placed = min(count, each * len(chosen))
            rows += [row for row in chosen for _ in range(each)][:placed]
            count -= placed
            in_last = placed - each * (len(chosen) - 1)
            for left, some in ((free - each * size, chosen[:-1]), (free - in_last * size, chosen[-1:])):
                if left and some:
                    rows_by_free.setdefault(left, []).extend(some)
                    frees |= 1 << left
    row_of = np.empty(len(lengths), dtype=np.int64)
    row_of[order] = rows
    return row_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskRows(Rows):
    """Some rows of examples. Made by `ExampleBatches`.

    A row has the segments of its examples one after another, each a document, and then padding. Padding is cut into
    documents as long as a segment may be, because a model may have no positions beyond. Example k of a row has document
    k; of dpo documents 2k (chosen) and 2k + 1 (rejected). The target of a place is the next token of the segment if
    that token is learned, else -100; always -100 in a segment's last place and in padding.
    """

    # The global numbers of the rows' examples over all sources, [rows, examples_per_row] int64; -1 for none.
    examples: Tensor
    labels: Tensor  # [rows, examples_per_row] bool; of kto: whether the example is desirable

    def select(self, rows: slice) -> TaskRows:
        """The rows of the slice."""
        return TaskRows(**{name: getattr(self, name)[rows] for name in TaskRows.__dataclass_fields__})


class Counts(NamedTuple):
    """The counts of some rows, by which losses are averaged."""

    examples: int
    learned: int  # targets; for kto, of the records' own completions only
    desirable: int  # kto: examples with a desirable completion


class ExampleBatches:
    """The rows of a run's examples: training rows, whose order depends on (data, seed, step) alone, and held-out rows.

    Of each source, one example in 20 is held out, at most 128; of fewer than 20 examples none. The seed changes neither
    this choice nor the packing. A row holds either training or held-out examples, of one source. The seed orders the
    training rows, see `Order`; the weights of a mixture count rows.
    data: a source, or a mixture of them.
    sequence_length: the longest segment. A row of dpo is twice as wide, for a pair lies in one row.
    packed: whether examples share rows; if not, a row has one example.
    Raises ValueError as `SourceTurns` does for the weights, and for a segment longer than `sequence_length`.
    """

    def __init__(
        self,
        data: ExampleSource | Mixture,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        packed: bool = True,
    ) -> None:
        self._sources: list[ExampleSource] = [data]  # type: ignore[list-item]
        weights = [Fraction(1)]
        if isinstance(data, Mixture):
            self._sources = [source for source, _ in data.parts]  # type: ignore[misc]
            weights = [weight for _, weight in data.parts]
        self._task = self._sources[0].task
        self._batch_size = batch_size
        self._length = sequence_length
        self.row_width = sequence_length * (2 if self._task == "dpo" else 1)  # places of a row
        self._end = self._sources[0].tokenizer.end
        self._firsts = np.cumsum([0, *(len(source.lengths) for source in self._sources)])  # each source's first example
        learned = np.concatenate([source.learned for source in self._sources])
        self._learned = learned.sum(1) if self._task == "dpo" else learned[:, 0]
        self._labels = np.concatenate([source.labels for source in self._sources])
        self._trained: list[_Packing] = []
        self._held_out: list[NDArray[np.int64]] = []  # the examples of each held-out row
        self._places = 0  # places of the training rows that hold a token, not padding
        for source, first in zip(self._sources, self._firsts[:-1].tolist(), strict=True):
            lengths = source.lengths
            if len(lengths) and (longest := int(lengths.max())) > sequence_length:
                raise ValueError(f"a segment has {longest} tokens, above the sequence length {sequence_length}")
            places = lengths.sum(1) if self._task == "dpo" else lengths.max(1)
            count = len(places)
            held_out = even_middles(min(HELD_OUT_MOST, count // HELD_OUT_PART), count)
            trained = np.delete(np.arange(count), held_out)
            for numbers, is_held_out in ((trained, False), (np.array(held_out, dtype=np.int64), True)):
                row_of = pack(places[numbers], self.row_width) if packed else np.arange(len(numbers))
                packing = _Packing(row_of, numbers + first)
                if is_held_out:
                    self._held_out += [packing[row] for row in range(len(packing))]
                else:
                    self._trained.append(packing)
                    self._places += int(places[numbers].sum())
        self._order = Order(weights, [len(packing) for packing in self._trained], seed)
        # The most examples in any row, held-out rows included.
        self.examples_per_row = max(packing.most for packing in self._trained)
        self.examples_per_row = max(self.examples_per_row, *map(len, self._held_out), 1)

    @property
    def num_examples(self) -> int:
        """The number of examples of all sources, held-out ones included."""
        return int(self._firsts[-1])

    @property
    def num_samples(self) -> int:
        """The number of training rows: an epoch of each source."""
        return sum(map(len, self._trained))

    @property
    def num_held_out(self) -> int:
        """The number of held-out rows; 0 where no source has 20 examples."""
        return len(self._held_out)

    @property
    def fill(self) -> float:
        """The share of the training rows' places that hold a token, not padding."""
        return self._places / (self.num_samples * self.row_width)

    def describe(self) -> str:
        """The training rows in words, as "57 examples in 24 rows of 64 tokens (80% full), 3 held out; …"."""
        held_out, size = sum(map(len, self._held_out)), self._batch_size
        trained, rows = self.num_examples - held_out, self.num_samples
        epoch = f", {rows / size:,.1f} steps an epoch" if len(self._sources) == 1 else ""
        remedy = "; give fewer with --data.batch-size" if size > rows else ""
        return (
            f"{trained:,} examples in {rows:,} rows of {self.row_width:,} tokens ({self.fill:.0%} full), {held_out:,} "
            f"held out; a step takes {size:,} rows, {size * trained / rows:,.1f} examples on average{epoch}{remedy}"
        )

    def batch(self, step: int, rows: slice, which: int = 0) -> TaskRows:
        """These rows of the global batch of `step`; only these rows are read.

        which: 0; for kto also 1, the same rows with the mismatched completions.
        """
        return self._read(self._locate(step, rows), which)

    def held_out(self, rows: slice, which: int = 0) -> TaskRows:
        """These rows of all held-out rows. which: as in `batch`."""
        return self._read(self._held_out[rows], which)

    def counts(self, step: int, rows: slice) -> Counts:
        """Counts of these rows of the global batch of `step`; no token is read."""
        return self._count(self._locate(step, rows))

    def held_out_counts(self, rows: slice) -> Counts:
        """Counts of these rows of all held-out rows; no token is read."""
        return self._count(self._held_out[rows])

    @property
    def num_every(self) -> int:
        """The number of all rows, training and held out."""
        return self.num_samples + self.num_held_out

    def every(self, rows: slice, which: int = 0) -> TaskRows:
        """These rows of a list of all rows: the training rows, source by source, then the held-out rows.

        For a pass over all data, as for a reference model's log-probabilities. which: as in `batch`.
        """
        return self._read(self._every(rows), which)

    def examples(self, step: int, rows: slice) -> Tensor:
        """`TaskRows.examples` of these rows of the global batch of `step`; no token is read."""
        return self._numbers(self._locate(step, rows))

    def held_out_examples(self, rows: slice) -> Tensor:
        """`TaskRows.examples` of these rows of all held-out rows; no token is read."""
        return self._numbers(self._held_out[rows])

    def examples_of_every(self, rows: slice) -> Tensor:
        """`TaskRows.examples` of these rows of `every`; no token is read."""
        return self._numbers(self._every(rows))

    def _every(self, rows: slice) -> list[NDArray[np.int64]]:
        """The global numbers of the examples in each of these rows of `every`."""
        starts = np.cumsum([0, *map(len, self._trained)])  # the number of each source's first row
        found = []
        for row in range(*rows.indices(self.num_every)):
            if row >= self.num_samples:
                found.append(self._held_out[row - self.num_samples])
            else:
                source = int(np.searchsorted(starts, row, side="right")) - 1
                found.append(self._trained[source][row - int(starts[source])])
        return found

    def _numbers(self, rows: Sequence[NDArray[np.int64]]) -> Tensor:
        numbers = np.full((len(rows), self.examples_per_row), -1, dtype=np.int64)
        for row, each in enumerate(rows):
            numbers[row, : len(each)] = each
        return torch.from_numpy(numbers)

    def _locate(self, step: int, rows: slice) -> list[NDArray[np.int64]]:
        """The global numbers of the examples in each of these rows of the global batch of `step`."""
        first, found = step * self._batch_size, []
        for row in range(*rows.indices(self._batch_size)):
            source, number = self._order(first + row)
            found.append(self._trained[source][number])
        return found

    def _count(self, rows: Sequence[NDArray[np.int64]]) -> Counts:
        numbers = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        return Counts(len(numbers), int(self._learned[numbers].sum()), int(self._labels[numbers].sum()))

    def _read(self, rows: Sequence[NDArray[np.int64]], which: int) -> TaskRows:
        if which not in ((0, 1) if self._task == "kto" else (0,)):
            raise ValueError(f"rows of {self._task} have no set {which}; only kto has a second set of rows")
        shape, per_row = (len(rows), self.row_width), (len(rows), self.examples_per_row)
        tokens, targets = np.full(shape, self._end, dtype=np.int64), np.full(shape, NOT_LEARNED, dtype=np.int64)
        positions, documents = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        examples, labels = np.full(per_row, -1, dtype=np.int64), np.zeros(per_row, dtype=np.bool_)
        for row, numbers in enumerate(rows):
            examples[row, : len(numbers)] = numbers
            labels[row, : len(numbers)] = self._labels[numbers]
            place = document = 0
            for segment in (each for number in numbers.tolist() for each in self._segments(number, which)):
                stop = place + len(segment.tokens)
                tokens[row, place:stop] = segment.tokens
                targets[row, place : stop - 1] = np.where(segment.learned[1:], segment.tokens[1:], NOT_LEARNED)
                positions[row, place:stop] = np.arange(stop - place)
                documents[row, place:stop] = document
                place, document = stop, document + 1
            left = np.arange(self.row_width - place)
            positions[row, place:], documents[row, place:] = left % self._length, document + left // self._length
        return TaskRows(
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets),
            positions=torch.from_numpy(positions),
            documents=torch.from_numpy(documents),
            examples=torch.from_numpy(examples),
            labels=torch.from_numpy(labels),
        )

    def _segments(self, number: int, which: int) -> tuple[MaskedTokens, ...]:
        """The segments of an example that a row holds. number: the global number. which: as in `batch`."""
        source = int(np.searchsorted(self._firsts, number, side="right")) - 1
        segments = self._sources[source].read(number - int(self._firsts[source])).segments
        return segments if self._task == "dpo" else (segments[which],)
