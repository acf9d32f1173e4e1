"""Batches of what a run is trained on, in an order that no mesh, no worker and no restart changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from weft.mesh import derive_key

from .order import Turns, permute
from .sources import Data, Mixture, check_enough
from .split import split
from .streams import Stream


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Some rows of a batch: tokens and targets [rows, T] int64.

    positions, documents: of packed rows; None where a row is one run of text. A position counts from 0 at the beginning of its
    document, or of the row where the document began before it; documents are numbered along a row.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None
    documents: Tensor | None

    def named(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        given = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: each for name, each in given.items() if each is not None}


class Batches:
    """Sequences of the data, in an order that is a function of (seed, epoch, step) alone, and those that are held out.

    A sample is T neighbouring tokens, its target one token later. What is held out is said by `split`, and is the same
    whatever the seed. Every epoch visits each of the other samples once, in an order that the key ("order", source, epoch) of
    the seed decides; a source of a mixture has epochs of its own, and its turns. Where a run goes on is so its step and nothing else.
    packed: tokens see their own document alone, and its positions begin at 0.
    Raises ValueError as `check_enough` does, and for weights as `Turns`.
    """

    def __init__(self, data: Data, *, sequence_length: int, batch_size: int, seed: int, packed: bool = False) -> None:
        check_enough(data, sequence_length)
        parts = data.parts if isinstance(data, Mixture) else ((data, Fraction(1)),)
        self._streams = [source.open() for source, _ in parts]
        self._splits = [split(stream, sequence_length) for stream in self._streams]
        self._turns = Turns([weight for _, weight in parts])
        self._seed = seed
        self._held_out = [(number, start) for number, each in enumerate(self._splits) for start in each.held_out]
        self._length = sequence_length
        self._batch_size = batch_size
        self._packed = packed

    @property
    def num_samples(self) -> int:
        """Samples that are trained on, in an epoch of each source."""
        return sum(len(each.trained) for each in self._splits)

    @property
    def num_held_out(self) -> int:
        """Samples that are held out."""
        return len(self._held_out)

    def batch(self, step: int, rows: slice) -> Rows:
        """The given rows of the global batch of `step`; no others are read."""
        first = step * self._batch_size
        return self._read([self._place(first + row) for row in range(*rows.indices(self._batch_size))])

    def held_out(self, rows: slice) -> Rows:
        """Those rows of all that is held out."""
        return self._read(self._held_out[rows])

    def _place(self, sample: int) -> tuple[int, int]:
        """The source of a sample of the run, and the place of its first token there."""
        source, number = self._turns(sample)
        trained = self._splits[source].trained
        epoch, number = divmod(number, len(trained))
        return source, trained.start(permute(number, len(trained), derive_key(self._seed, "order", source, epoch)))

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
            begins = _begins(self._streams[source], start, T)
            documents[row, begins[1:]] = 1
            positions[row] = np.arange(T) - np.repeat(begins, np.diff(begins, append=T))
        return Rows(
            tokens=tokens,
            targets=targets,
            positions=torch.from_numpy(positions),
            documents=torch.from_numpy(documents.cumsum(1)),
        )


def _begins(stream: Stream, start: int, length: int) -> NDArray[np.int64]:
    """Where documents begin in `length` tokens from `start` on, counted from there; 0 for the one that began before."""
    ends = stream.document_ends(start, start + length) - start
    return np.concatenate(([0], ends[ends < length]))
