"""The uncut examples of a part as arrays, in memory or memory-mapped from the files of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..contents import ShardEntry
from ..manifest import ANEW, TokenShard
from ..streams import ShardStream
from .example import SEGMENTS, Task

TOKENS_AT_ONCE = 1 << 24  # in a pass over masks, to bound memory


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """The segments of some examples, one after another, of any length."""

    tokens: NDArray[np.unsignedinteger[Any]]  # [tokens]
    masks: NDArray[np.uint8]  # [tokens]: 1 where a token is learned
    ends: NDArray[np.integer[Any]]  # [segments]: the place after each segment's last token
    labels: NDArray[np.uint8]  # [examples], 1 where the completion is desirable; empty unless kto

    @classmethod
    def of(cls, entries: Sequence[ShardEntry], dtype: str) -> Arrays:
        """Concatenate entries. dtype: of the tokens."""
        documents = [document for entry in entries for document in entry.documents]
        masks = [mask for entry in entries for mask in entry.masks]
        return cls(
            np.concatenate([each.astype(dtype) for each in documents] or [np.empty(0, dtype)]),
            np.concatenate([each.view(np.uint8) for each in masks] or [np.empty(0, np.uint8)]),
            np.array([len(each) for each in documents], dtype=np.int64).cumsum(),
            np.array([entry.label for entry in entries if entry.label is not None], dtype=np.uint8),
        )

    def find_lengths(self) -> NDArray[np.int64]:
        """The tokens of each segment, [segments]."""
        ends = self.ends.astype(np.int64)
        return ends - np.concatenate(([0], ends[:-1]))

    def count_learned(self, length: int) -> NDArray[np.int64]:
        """The learned tokens among the first `length` of each segment, [segments]. A segment's first token is no
        target, and does not count.
        """
        ends = self.ends.astype(np.int64)
        lengths = self.find_lengths()
        starts = ends - lengths
        stops = starts + np.minimum(lengths, length)
        counts = np.zeros(len(ends), dtype=np.int64)
        first = 0
        while first < len(ends):
            last = max(int(np.searchsorted(ends, starts[first] + TOKENS_AT_ONCE, side="right")), first + 1)
            begin, end = int(starts[first]), int(ends[last - 1])
            sums = np.concatenate(([0], np.cumsum(self.masks[begin:end] != 0, dtype=np.int64)))
            counts[first:last] = sums[stops[first:last] - begin] - sums[starts[first:last] + 1 - begin]
            first = last
        return counts


class UncutExamples(Protocol):
    """The uncut examples of a part, in memory or on disk; can be pickled."""

    @property
    def arrays(self) -> Arrays: ...


@dataclass(frozen=True, eq=False)
class PartInMemory:
    """A part whose arrays are in memory."""

    arrays: Arrays


@dataclass(frozen=True, eq=False)
class PartOnDisk:
    """A shard of a prepared folder, memory-mapped at the first use.

    Raises ValueError where a file contradicts the manifest, as `ShardStream` does.
    """

    folder: Path
    shard: TokenShard
    task: Task
    dtype: str  # of tokens
    vocab_size: int

    @cached_property
    def arrays(self) -> Arrays:
        """The arrays of the shard's files."""
        stream = ShardStream(self.folder, [self.shard], self.dtype, self.vocab_size)
        tokens, ends = stream.map(0) if self.shard.tokens else (np.empty(0, np.uint16), np.empty(0, np.uint64))
        masks, *labels = (self._map(name) for name in self.shard.names[2:])
        return Arrays(tokens, masks, ends, labels[0] if labels else np.empty(0, dtype=np.uint8))

    def check(self) -> None:
        """Read masks and labels. Raises ValueError for a byte that is neither 0 nor 1."""
        arrays = self.arrays
        for name, values in zip(self.shard.names[2:], (arrays.masks, arrays.labels), strict=False):
            for start in range(0, len(values), TOKENS_AT_ONCE):
                if (highest := int(values[start : start + TOKENS_AT_ONCE].max())) > 1:
                    raise ValueError(
                        f"{self.folder / name} is not what was prepared: it has a byte {highest}, and 0 and 1 are "
                        f"known; {ANEW}"
                    )

    def _map(self, name: str) -> NDArray[np.uint8]:
        count = self.shard.tokens if name.startswith("masks") else self.shard.documents // SEGMENTS[self.task]
        if not count:  # an empty file cannot be mapped
            return np.empty(0, dtype=np.uint8)
        return np.memmap(self.folder / name, dtype=np.uint8, mode="r", shape=(count,))

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in self.__dataclass_fields__}
