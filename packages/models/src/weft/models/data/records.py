"""Records of JSON, CSV and Parquet as the data of a run: the bytes of their texts, in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .inputs import Columns, LeftOut, Part, find_parts, read_part
from .kinds import Kind, kind_of
from .text import BytesOfText, entries_under, first_words
from .tokenizer import BYTE_END

if TYPE_CHECKING:
    from .streams import RecordStream

COLUMNS = Columns()  # the field "text"
MOST_BYTES = 1 << 30  # each process holds the texts in memory


@dataclass(frozen=True, slots=True)
class Records(BytesOfText):
    """The documents of a file or a folder with records; a token is a byte. Made by `find_records`."""

    name: str
    parts: tuple[Part, ...]
    num_tokens: int  # the end of each document included
    sha256: str  # of the texts, when they were found
    prompt: str  # the first words of the texts, with which a run begins its sample
    skipped: tuple[Path, ...]  # files without text
    passed: tuple[str, ...]  # descriptions of folder entries passed over because they are no files, such as pipes

    def open(self) -> RecordStream:
        """The tokens, read again. Raises ValueError where the files have changed since they were found."""
        import numpy as np

        from .streams import RecordStream

        tokens, ends = np.empty(self.num_tokens, dtype=np.uint16), []
        place = 0
        for text in texts_of(self.parts, LeftOut(empty=0, skipped=[], bad=0, passed=[])):
            content = text.encode()
            stop = place + len(content)
            if stop < self.num_tokens:
                tokens[place:stop] = np.frombuffer(content, dtype=np.uint8)
                tokens[stop] = BYTE_END
            place = stop + 1
            ends.append(place)
        if place != self.num_tokens:
            raise ValueError(f"{self.name} has changed since the run began: {place} tokens for {self.num_tokens}")
        return RecordStream(tokens, np.array(ends, dtype=np.int64))


def holds_records(path: Path) -> bool:
    """Whether a file, or any file of a folder, holds records of JSON, CSV or Parquet.

    Raises ValueError as `kind_of` does.
    """
    found = entries_under(path).files
    kinds = {kind_of(file, COLUMNS.field, is_named=path.is_file()) for file in found}
    return bool(kinds - {Kind.TEXT, Kind.NONE})


def find_records(path: Path) -> Records:
    """The documents under `path`: texts, and records with a text in the field or column "text".

    Raises ValueError for a record without the field, a file that cannot be read, and more than 1 GiB.
    """
    try:
        parts = tuple(find_parts([path], COLUMNS, MOST_BYTES))
        nbytes = sum(piece.nbytes for part in parts for piece in part)
        if nbytes > MOST_BYTES:
            raise ValueError(
                f"{path} has {nbytes:,} bytes of records, more than the {MOST_BYTES:,} that are read at once"
            )
        left_out, digest, num_tokens, prompt = LeftOut(empty=0, skipped=[], bad=0, passed=[]), hashlib.sha256(), 0, ""
        for text in texts_of(parts, left_out):
            content = text.encode()
            digest.update(content + b"\xff")  # a byte absent from UTF-8 marks the end
            num_tokens += len(content) + 1
            prompt = prompt or first_words(text)
    except ValueError as error:
        raise ValueError(
            f"data.path: {error}; weft data prepare makes tokens of any field, of any size, that --data.path takes"
        ) from None
    if not num_tokens:
        raise ValueError(f"data.path {path} holds no text: {left_out.empty} empty documents; give files that do")
    skipped = tuple(map(Path, left_out.skipped))
    return Records(str(path), parts, num_tokens, digest.hexdigest(), prompt or " ", skipped, tuple(left_out.passed))


def texts_of(parts: tuple[Part, ...], left_out: LeftOut) -> Iterator[str]:
    """The texts of all parts. left_out: an empty `LeftOut`, which is filled while the texts are read."""
    for part in parts:
        yield from read_part(part, COLUMNS, left_out)
