"""Text as bytes, some of it held out, and batches whose order no mesh changes."""

from __future__ import annotations

import codecs
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from weft.mesh import derive_key

from ..terminal import printable

if TYPE_CHECKING:
    from torch import Tensor

END = 256  # the token after each document; bytes are their own tokens
VOCAB_SIZE = 257  # odd: it shards unevenly
HELD_OUT_PART = 20  # one sequence of so many is held out,
HELD_OUT_MOST = 128  # but no more than these: to read them takes as long as a few steps


def encode(text: str) -> list[int]:
    """The bytes of the text in UTF-8, as tokens."""
    return list(text.encode())


def decode(tokens: Iterable[int]) -> str:
    """The text of the tokens; END and what is not UTF-8 become U+FFFD."""
    return "".join(decode_each(tokens))


def decode_each(tokens: Iterable[int]) -> Iterator[str]:
    """The text of the tokens in pieces, each as soon as its last token is there; as `decode`."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        yield decoder.decode(bytes([token]) if token < END else b"\xff")
    yield decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents on disk, in order.

    skipped: files of the folder that are no text. prompt: what a sample of such text may begin with.
    """

    name: str
    files: tuple[Path, ...]
    num_bytes: int
    skipped: tuple[Path, ...] = ()
    prompt: str = "def "


def find_corpus(path: Path | None) -> Corpus:
    """The documents under `path`: a text file, or a folder of them, whose files that are not UTF-8 are skipped; the
    standard library's source where None.

    Raises ValueError for a path that is missing, holds no text, or is a file that is not UTF-8.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        sources = tuple(file for file in sorted(_sources(root)) if _bad_byte(file) is None)
        return Corpus("the Python standard library", sources, sum(file.stat().st_size for file in sources))
    if not path.exists():
        raise ValueError(f"data.path {path} does not exist; give a text file or a folder of them")
    if path.is_file() and (offset := _bad_byte(path)) is not None:
        raise ValueError(f"data.path: {path} is not UTF-8 text (byte {offset} of the file); convert it")
    found = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
    shown = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    files: list[Path] = []
    skipped: list[Path] = []
    for file in shown:
        (files if _bad_byte(file) is None else skipped).append(file)
    num_bytes = sum(file.stat().st_size for file in files)
    if not num_bytes:
        raise ValueError(f"data.path {path} holds no text; give a text file or a folder of them, in UTF-8")
    return Corpus(str(path), tuple(files), num_bytes, tuple(skipped), _first_words(files))


def _first_words(files: list[Path]) -> str:
    """Two words with which the text begins, and a space: 40 characters at most."""
    for file in files:
        with file.open(encoding="utf-8-sig") as opened:
            words = printable(opened.read(1000)).split()[:2]
        if words:
            return f"{' '.join(words)[:39]} "
    return " "


def check_enough(corpus: Corpus, sequence_length: int) -> None:
    """Raises ValueError where the corpus has not two whole sequences: one to train on, one to hold out."""
    tokens = corpus.num_bytes + len(corpus.files)
    if tokens <= 2 * sequence_length:
        raise ValueError(
            f"{corpus.name} has {tokens} tokens, fewer than two sequences of data.sequence_length {sequence_length} and "
            f"the next token, to train on one and hold one out; give more text or a shorter sequence"
        )


def check_vocabulary(size: int) -> None:
    """Raises ValueError where a model of `size` tokens has not all that a text is made of."""
    if size < VOCAB_SIZE:
        raise ValueError(
            f"model.vocab_size {size} is below {VOCAB_SIZE}: a text's tokens are its bytes, 0 to 255, and the end of a "
            f"document; give {VOCAB_SIZE} or more"
        )


class Batches:
    """Windows of the corpus, in an order that is a function of the seed alone, and those that are held out.

    Sample i is tokens [i * T, i * T + T], its target one token later, so each token is the target of one sample. Held out is
    one sample in 20, at least one and at most 128, evenly spaced through the text, whatever the seed; every epoch visits
    each of the others once, shuffled.
    Raises ValueError as `check_enough` does.
    """

    def __init__(self, corpus: Corpus, *, sequence_length: int, batch_size: int, seed: int) -> None:
        import torch

        check_enough(corpus, sequence_length)
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
        count = (len(self._tokens) - 1) // sequence_length
        held_out = max(1, min(HELD_OUT_MOST, count // HELD_OUT_PART))
        self._held_out = [(2 * i + 1) * count // (2 * held_out) for i in range(held_out)]  # the middle of each part
        self._trained = sorted(set(range(count)).difference(self._held_out))

    @property
    def num_samples(self) -> int:
        """Samples that are trained on, in an epoch."""
        return len(self._trained)

    @property
    def num_held_out(self) -> int:
        """Samples that are held out."""
        return len(self._held_out)

    def batch(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Tokens and targets [rows, T] int64 of the given rows of the global batch of `step`."""
        samples = []
        for row in range(*rows.indices(self._batch_size)):
            epoch, position = divmod(step * self._batch_size + row, self.num_samples)
            samples.append(self._trained[_order(self._seed, epoch, self.num_samples)[position]])
        return self._windows(samples)

    def held_out(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Tokens and targets [rows, T] int64 of those rows of all that is held out."""
        return self._windows(self._held_out[rows])

    def _windows(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        import torch

        if not samples:
            empty = torch.empty(0, self._length, dtype=torch.int64)
            return empty, empty.clone()
        starts = [sample * self._length for sample in samples]
        windows = torch.stack(
            [self._tokens[start : start + self._length + 1] for start in starts]
        ).long()  # [rows, T + 1]
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
