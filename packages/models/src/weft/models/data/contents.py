"""`Contents`: how `prepare` turns input into entries of shards. `Texts` makes documents, `ExampleRecords` examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .inputs import Columns, InputPart, LeftOut, find_parts, read_part
from .manifest import BoundaryTokens
from .text import first_words
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .examples.example import Task

TEXTS_AT_ONCE = 1 << 20  # characters in a call of the tokenizer


class Unusable(ValueError):
    """Unusable input: ends a preparation, also when raised in a worker process."""


class ShardEntry(NamedTuple):
    """A document of text, or an example, to be appended to the files of a shard."""

    # The tokens of a document, or of each segment of an example.
    documents: tuple[NDArray[np.integer[Any]], ...]
    masks: tuple[NDArray[np.bool_], ...] = ()  # of an example: the learned tokens of each segment
    label: bool | None = None  # of kto
    prompt: str = ""  # the first words of the text, for `TokenShard.prompt`
    size: int = 0  # about the bytes of input, for reports of progress
    place: object = ""  # of an example: where the record is; printed in errors


class Contents(Protocol):
    """Turns the parts of a preparation's input into entries; pickled for every worker process."""

    @property
    def task(self) -> Task: ...
    def find_parts(self, inputs: Sequence[Path], part_bytes: int, leave_out: Path | None) -> list[InputPart]:
        """The parts of the inputs; leave_out is a folder to pass over. Raises ValueError for unusable input."""
        ...

    def request(self) -> dict[str, Any]:
        """The options that determine the bytes of the shards, besides inputs and tokenizer; kept in the manifest."""
        ...

    def dated(self, time: datetime) -> Contents:
        """A copy with `time` as the current time, which is equal for all runs and processes of a preparation."""
        ...

    def entries(self, part: InputPart, left_out: LeftOut) -> Iterator[ShardEntry]:
        """The entries of a part, in order. left_out: filled here with the input that made no entry.

        Raises Unusable for unusable input.
        """
        ...


@dataclass(frozen=True, slots=True)
class Texts:
    """The `Contents` of pretraining: each text becomes a document between the tokens of `boundary`."""

    columns: Columns
    boundary: BoundaryTokens
    tokenizer: Tokenizer

    @property
    def task(self) -> Task:
        """pretrain."""
        return "pretrain"

    def find_parts(self, inputs: Sequence[Path], part_bytes: int, leave_out: Path | None) -> list[InputPart]:
        """See `find_parts` of inputs.py."""
        return find_parts(inputs, self.columns, part_bytes, leave_out=leave_out)

    def request(self) -> dict[str, Any]:
        """The columns and the tokens around documents; see `Contents`."""
        return {
            **asdict(self.columns),
            "before_each": list(self.boundary.begin),
            "after_each": list(self.boundary.end),
        }

    def dated(self, time: datetime) -> Texts:
        """The object itself: texts do not depend on the time."""
        return self

    def entries(self, part: InputPart, left_out: LeftOut) -> Iterator[ShardEntry]:
        """The documents of a part; see `Contents`."""
        import numpy as np

        prompt = ""
        begin, end = (np.array(each, dtype=np.uint32) for each in (self.boundary.begin, self.boundary.end))
        for texts in _batch_texts(_translate_errors(read_part(part, self.columns, left_out))):
            for text, found in zip(texts, self.tokenizer.encode_each(texts), strict=True):
                tokens = np.frombuffer(found, dtype=np.uint8) if isinstance(found, bytes) else np.array(found)
                if len(begin) or len(end):
                    tokens = np.concatenate((begin, tokens, end)) if len(tokens) else np.concatenate((begin, end))
                prompt = prompt or first_words(text)
                if len(tokens):
                    yield ShardEntry((tokens,), prompt=prompt, size=len(text))
                else:  # a text without tokens
                    left_out.empty += 1


def _translate_errors(texts: Iterator[str]) -> Iterator[str]:
    """The texts. A ValueError about the input becomes an `Unusable`."""
    try:
        yield from texts
    except ValueError as error:
        raise Unusable(str(error)) from None


def _batch_texts(texts: Iterator[str]) -> Iterator[list[str]]:
    """The texts in lists of about TEXTS_AT_ONCE characters."""
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        batch.append(text)
        num_chars += len(text)
        if num_chars >= TEXTS_AT_ONCE:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch
