"""Examples of random tokens, which hold their own number, as a source that counts what is read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from weft.models.data.examples.example import SEGMENTS, Example, MaskedTokens, Task
from weft.models.data.tokenizer import Tokenizer, byte_tokenizer


@dataclass
class ArraySource:
    """Examples in memory, made by `random_source`."""

    task: Task
    examples: list[Example]
    reads: list[int] = field(default_factory=list)  # the numbers read so far
    name: str = "arrays"

    @property
    def tokenizer(self) -> Tokenizer:
        return byte_tokenizer()

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([[len(segment.tokens) for segment in each.segments] for each in self.examples], dtype=np.int64)

    @property
    def learned(self) -> NDArray[np.int64]:
        return np.array([[segment.learned[1:].sum() for segment in each.segments] for each in self.examples])

    @property
    def labels(self) -> NDArray[np.bool_]:
        return np.array([bool(each.label) for each in self.examples], dtype=np.bool_)

    def read(self, number: int) -> Example:
        self.reads.append(number)
        return self.examples[number]


def random_source(task: Task, count: int, longest: int, *, seed: int = 0, first: int = 0) -> ArraySource:
    """Examples of 1 to `longest` tokens a segment. Each token of an example is `first` + its number; a segment's last
    token is learned where it has two or more.
    """
    draw = np.random.default_rng(seed)
    examples = []
    for number in range(count):
        segments = []
        for size in draw.integers(1, longest + 1, SEGMENTS[task]).tolist():
            learned = draw.random(size) < 0.5
            learned[-1] = True
            segments.append(MaskedTokens(np.full(size, first + number, dtype=np.int64), learned))
        examples.append(Example(tuple(segments), bool(draw.integers(2)) if task == "kto" else None))
    return ArraySource(task, examples)
