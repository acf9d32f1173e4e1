"""Text as bytes, and batches whose order no mesh changes."""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from weft.mesh import derive_key

if TYPE_CHECKING:
    from torch import Tensor

END = 256  # the token after each document; bytes are their own tokens
VOCAB_SIZE = 257  # odd: it shards unevenly


def encode(text: str) -> list[int]:
    """The bytes of the text in UTF-8, as tokens."""
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    """The text of the tokens; END and what is not UTF-8 become U+FFFD."""
    return b"".join(bytes([token]) if token < END else b"\xff" for token in tokens).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents on disk, in order."""

    name: str
    files: tuple[Path, ...]
    num_bytes: int


def find_corpus(path: Path | None) -> Corpus:
    """The documents under `path`: a text file, or a folder of them; the standard library's source where None.

    Raises ValueError for a path that is missing, empty, or holds bytes that are not UTF-8, naming the first of them.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in sorted(_sources(root)) if _bad_byte(file) is None]
        return Corpus("the Python standard library", tuple(files), sum(file.stat().st_size for file in files))
    if not path.exists():
        raise ValueError(f"data.path {path} does not exist; give a text file or a folder of them")
    hidden = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
    files = [file for file in hidden if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    for file in files:
        offset = _bad_byte(file)
        if offset is not None:
            raise ValueError(
                f"data.path: {file} is not UTF-8 text (byte {offset} of the file); convert it, or leave it out"
            )
    num_bytes = sum(file.stat().st_size for file in files)
    if not num_bytes:
        raise ValueError(f"data.path {path} holds no text; give a text file or a folder of them")
    return Corpus(str(path), tuple(files), num_bytes)


def check_enough(corpus: Corpus, sequence_length: int) -> None:
    """Raises ValueError where the corpus has not one whole sequence."""
    tokens = corpus.num_bytes + len(corpus.files)
    if tokens <= sequence_length:
        raise ValueError(
            f"{corpus.name} has {tokens} tokens, fewer than one sequence of data.sequence_length {sequence_length} and "
            f"its next token; give more text or a shorter sequence"
        )


class Batches:
    """Windows of the corpus, in an order that is a function of the seed alone.

    Sample i is tokens [i * T, i * T + T], its target one token later; every epoch visits each sample once, shuffled.
    """

    def __init__(self, corpus: Corpus, *, sequence_length: int, batch_size: int, seed: int) -> None:
        import torch

        buffer = bytearray()
        ends = []
        for file in corpus.files:
            buffer += file.read_bytes()
            ends.append(len(buffer))
            buffer.append(0)
        self._tokens = torch.frombuffer(buffer, dtype=torch.uint8).to(torch.int16)
        self._tokens[ends] = END
        self._length = sequence_length
        self._batch_size = batch_size
        self._seed = seed
        self.num_samples = (len(self._tokens) - 1) // sequence_length

    def batch(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Tokens and targets [rows, T] int64 of the given rows of the global batch of `step`."""
        import torch

        samples = []
        for row in range(*rows.indices(self._batch_size)):
            epoch, position = divmod(step * self._batch_size + row, self.num_samples)
            start = _order(self._seed, epoch, self.num_samples)[position] * self._length
            samples.append(self._tokens[start : start + self._length + 1])
        if not samples:
            empty = torch.empty(0, self._length, dtype=torch.int64)
            return empty, empty.clone()
        windows = torch.stack(samples).long()  # [rows, T + 1]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@lru_cache(maxsize=2)  # a batch may lie across two epochs
def _order(seed: int, epoch: int, count: int) -> list[int]:
    order = list(range(count))
    random.Random(derive_key(seed, "order", epoch)).shuffle(order)
    return order


def _bad_byte(file: Path) -> int | None:
    try:
        file.read_bytes().decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def _sources(root: Path) -> Iterator[Path]:
    """The standard library's modules, without its tests and what others have installed."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages", "test", "tests")]
        yield from (Path(folder) / name for name in names if name.endswith(".py"))
