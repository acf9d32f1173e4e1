"""Text files as a corpus: each a document, its bytes the tokens."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..terminal import printable
from .tokenizer import Tokenizer, byte_tokenizer

if TYPE_CHECKING:
    from .streams import TextStream


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents on disk, in order; none is empty.

    skipped: files of the folder that are no text. prompt: what a sample of such text may begin with. sha256: of the texts, as
    `find_corpus` has read them.
    """

    name: str
    files: tuple[Path, ...]
    num_bytes: int
    skipped: tuple[Path, ...] = ()
    prompt: str = "def "
    sha256: str = ""

    @property
    def num_tokens(self) -> int:
        """Bytes, and an end for each document."""
        return self.num_bytes + len(self.files)

    @property
    def tokenizer(self) -> Tokenizer:
        """That of bytes."""
        return byte_tokenizer()

    @property
    def is_prepared(self) -> bool:
        """Whether it is of token shards."""
        return False

    def open(self) -> TextStream:
        """The tokens, of which what is asked for is read."""
        from .streams import TextStream

        return TextStream(self.files)


def find_corpus(path: Path | None) -> Corpus:
    """The documents under `path`: a text file, or a folder of them, whose files that are not UTF-8 are skipped; the
    standard library's source where None.

    Raises ValueError for a path that is missing, holds no text, or is a file that is not UTF-8.
    """
    if path is None:
        files, _, sha256 = _texts(sorted(_sources(Path(sysconfig.get_path("stdlib")))))
        return Corpus("the Python standard library", files, _num_bytes(files), sha256=sha256)
    if not path.exists():
        raise ValueError(f"data.path {path} does not exist; give a text file or a folder of them")
    if path.is_file() and (offset := _bad_byte(path.read_bytes())) is not None:
        raise ValueError(f"data.path: {path} is not UTF-8 text (byte {offset} of the file); convert it")
    files, skipped, sha256 = _texts(files_under(path))
    if not files:
        raise ValueError(f"data.path {path} holds no text; give a text file or a folder of them, in UTF-8")
    return Corpus(str(path), files, _num_bytes(files), skipped, _first_words(files), sha256)


def files_under(path: Path, leave_out: Path | None = None) -> list[Path]:
    """The file, or those of the folder in the order of their names, without the hidden ones, and those in `leave_out` within it."""
    if not path.is_dir():
        return [path]
    found = [file for file in sorted(path.rglob("*")) if file.is_file()]
    root = path.resolve()
    if leave_out is not None and root in leave_out.resolve().parents:
        out = path / leave_out.resolve().relative_to(root)
        found = [file for file in found if not file.is_relative_to(out)]
    return [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]


def first_words(text: str) -> str:
    """Two words with which the text begins, and a space: 40 characters at most; "" where there are none."""
    words = printable(text.removeprefix("\ufeff")[:1000]).split()[:2]
    return f"{' '.join(words)[:39]} " if words else ""


def _texts(files: Iterable[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...], str]:
    """Of the files those that hold text, those that hold something else, and the SHA-256 of the texts, each with its end."""
    texts, skipped, digest = [], [], hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        if _bad_byte(content) is not None:
            skipped.append(file)
        elif content:
            texts.append(file)
            digest.update(content + b"\xff")  # which no UTF-8 has
    return tuple(texts), tuple(skipped), digest.hexdigest()


def _num_bytes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _first_words(files: Iterable[Path]) -> str:
    for file in files:
        with file.open(encoding="utf-8") as opened:
            words = first_words(opened.read(1000))
        if words:
            return words
    return " "


def _bad_byte(content: bytes) -> int | None:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def _sources(root: Path) -> Iterator[Path]:
    """The standard library's modules, without its tests and what others have installed."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages", "test", "tests")]
        yield from (Path(folder) / name for name in names if name.endswith(".py"))
