"""Text files as a corpus: each file is a document, and bytes are tokens."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..terminal import printable
from .kinds import BOM, FileKind, kind_of
from .tokenizer import Tokenizer, byte_tokenizer

if TYPE_CHECKING:
    from .manifest import DataManifest, TokenShard
    from .streams import TextStream


class BytesOfText:
    """Base class of `Corpus` and `Records`: documents of text with bytes as tokens."""

    __slots__ = ()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of bytes."""
        return byte_tokenizer()

    @property
    def begin(self) -> tuple[int, ...]:
        """The tokens before each document: none."""
        return ()

    @property
    def is_prepared(self) -> bool:
        """False: the tokens come from text."""
        return False

    @property
    def shards(self) -> tuple[tuple[Path, TokenShard, DataManifest], ...]:
        """Empty: the tokens come from text."""
        return ()


@dataclass(frozen=True, slots=True)
class Corpus(BytesOfText):
    """Text documents on disk, in order. No document is empty. A byte order mark is not part of a text. Made by
    `find_corpus`.
    """

    name: str
    files: tuple[Path, ...]
    num_bytes: int
    skipped: tuple[Path, ...] = ()  # files of the folder without text
    prompt: str = "def "  # the beginning of a run's generated sample; the default suits the standard library
    sha256: str = ""  # of the texts, when they were found
    passed: tuple[str, ...] = ()  # see `Entries`

    @property
    def num_tokens(self) -> int:
        """The number of bytes, and an end for each document."""
        return self.num_bytes + len(self.files)

    def open(self) -> TextStream:
        """The tokens, read on demand."""
        from .streams import TextStream

        return TextStream(self.files)


def find_corpus(path: Path | None) -> Corpus:
    """The documents under `path`: a text file, or a folder's files of text in UTF-8. None: the standard library's
    source.

    Further files of a folder are skipped.
    Raises ValueError for a missing path, a path without text, and a file not text in UTF-8.
    """
    if path is None:
        files, _, num_bytes, sha256 = _read_texts(sorted(_standard_library_files(Path(sysconfig.get_path("stdlib")))))
        return Corpus("the Python standard library", files, num_bytes, sha256=sha256)
    if not path.exists():
        raise ValueError(f"data.path {path} does not exist; give a text file or a folder of them")
    entries = entries_under(path)
    if path.is_file() and (offset := _bad_byte(path.read_bytes())) is not None:
        raise ValueError(f"data.path: {path} is not UTF-8 text (byte {offset} of the file); convert it")
    files, skipped, num_bytes, sha256 = _read_texts(entries.files)
    if not files:
        raise ValueError(f"data.path {path} holds no text; give a text file or a folder of them, in UTF-8")
    return Corpus(str(path), files, num_bytes, skipped, _first_words(files), sha256, entries.passed)


@dataclass(frozen=True, slots=True)
class Entries:
    """The content of a folder, from `entries_under`."""

    files: tuple[Path, ...]
    passed: tuple[str, ...] = ()  # descriptions of the entries passed over, as links to folders, pipes and the like


def entries_under(path: Path, leave_out: Path | None = None) -> Entries:
    """The file at `path`; or the files under a folder, in the order of their names, without hidden files and folders.

    A link to a file counts as this file. Links to folders, links to nothing, pipes and the like are passed over,
    and described.
    leave_out: a folder within `path` whose files are left out.
    Raises ValueError for a path to anything but a file or a folder.
    """
    if not path.is_dir():
        if not path.is_file():
            raise ValueError(f"{path} is {_describe_entry(path)}; give a file, or a folder of files")
        return Entries((path,))
    root, out = path.resolve(), None if leave_out is None else leave_out.resolve()
    files, passed = [], []

    def unreadable(error: OSError) -> None:
        passed.append(f"{error.filename} (a folder that cannot be read: {error.strerror})")

    for name, folders, names in os.walk(path, onerror=unreadable):
        folder = Path(name)
        place = root / folder.relative_to(path)
        visible = [each for each in folders if not each.startswith(".") and place / each != out]
        folders[:] = [each for each in visible if not (folder / each).is_symlink()]
        passed += [f"{folder / each} (a link to a folder)" for each in visible if each not in folders]
        for entry in (folder / each for each in names if not each.startswith(".")):
            if entry.is_file():
                files.append(entry)
            else:
                passed.append(f"{entry} ({_describe_entry(entry)})")
    return Entries(tuple(sorted(files)), tuple(sorted(passed)))


def _describe_entry(entry: Path) -> str:
    """A description of a folder's entry besides files, as a link or a pipe."""
    if entry.is_symlink() and not entry.exists():
        return "a link to nothing"
    for kind in ("fifo", "socket", "block_device", "char_device"):
        if getattr(entry, f"is_{kind}")():
            return f"a {kind.replace('_', ' ').replace('char ', 'character ')}"
    return "no file"


def first_words(text: str) -> str:
    """The first two words of a text and a space, at most 40 characters; "" for a text without words.

    Used as the prompt of a corpus that contains the text.
    """
    words = printable(text.removeprefix("\ufeff")[:1000]).split()[:2]
    return f"{' '.join(words)[:39]} " if words else ""


def _read_texts(files: Iterable[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...], int, str]:
    """The files with text, the files without, and the number of bytes and SHA-256 of the texts, an end after each
    text.
    """
    texts, skipped, num_bytes, digest = [], [], 0, hashlib.sha256()
    for file in files:
        content = file.read_bytes().removeprefix(BOM)
        if _bad_byte(content) is not None or kind_of(file, (), is_named=False) is FileKind.NONE:
            skipped.append(file)
        elif content:
            texts.append(file)
            num_bytes += len(content)
            digest.update(content + b"\xff")  # a byte absent from UTF-8 marks the end
    return tuple(texts), tuple(skipped), num_bytes, digest.hexdigest()


def _first_words(files: Iterable[Path]) -> str:
    for file in files:
        with file.open(encoding="utf-8-sig") as opened:
            words = first_words(opened.read(1000))
        if words:
            return words
    return " "


def _bad_byte(content: bytes) -> int | None:
    """The index of the first byte not in UTF-8; None for text in UTF-8."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def _standard_library_files(root: Path) -> Iterator[Path]:
    """The modules of the standard library, without tests and without installed packages."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages", "test", "tests")]
        yield from (Path(folder) / name for name in names if name.endswith(".py"))
