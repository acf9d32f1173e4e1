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
from .kinds import BOM, Kind, kind_of
from .tokenizer import Tokenizer, byte_tokenizer

if TYPE_CHECKING:
    from .streams import TextStream


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents on disk, in order; none is empty.

    skipped: files of the folder that are no text. prompt: what a sample of such text may begin with. sha256: of the texts, as
    `find_corpus` has read them. passed: entries of the folder that are no files. A byte order mark is no part of a text.
    """

    name: str
    files: tuple[Path, ...]
    num_bytes: int
    skipped: tuple[Path, ...] = ()
    prompt: str = "def "
    sha256: str = ""
    passed: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Bytes, and an end for each document."""
        return self.num_bytes + len(self.files)

    @property
    def tokenizer(self) -> Tokenizer:
        """That of bytes."""
        return byte_tokenizer()

    @property
    def begin(self) -> tuple[int, ...]:
        """The tokens before each document: none."""
        return ()

    @property
    def is_prepared(self) -> bool:
        """Whether it is of token shards."""
        return False

    def open(self) -> TextStream:
        """The tokens, of which what is asked for is read."""
        from .streams import TextStream

        return TextStream(self.files)


def find_corpus(path: Path | None) -> Corpus:
    """The documents under `path`: a text file, or a folder of them, whose files that are not text in UTF-8 are skipped; the
    standard library's source where None.

    Raises ValueError for a path that is missing, holds no text, or is a file that is not text in UTF-8.
    """
    if path is None:
        files, _, num_bytes, sha256 = _texts(sorted(_sources(Path(sysconfig.get_path("stdlib")))))
        return Corpus("the Python standard library", files, num_bytes, sha256=sha256)
    if not path.exists():
        raise ValueError(f"data.path {path} does not exist; give a text file or a folder of them")
    found = entries_under(path)
    if path.is_file() and (offset := _bad_byte(path.read_bytes())) is not None:
        raise ValueError(f"data.path: {path} is not UTF-8 text (byte {offset} of the file); convert it")
    files, skipped, num_bytes, sha256 = _texts(found.files)
    if not files:
        raise ValueError(f"data.path {path} holds no text; give a text file or a folder of them, in UTF-8")
    return Corpus(str(path), files, num_bytes, skipped, _first_words(files), sha256, found.passed)


@dataclass(frozen=True, slots=True)
class Entries:
    """What a folder holds: its files, and entries that are neither files nor folders, each with what it is."""

    files: tuple[Path, ...]
    passed: tuple[str, ...] = ()


def entries_under(path: Path, leave_out: Path | None = None) -> Entries:
    """The file, or those of the folder in the order of their names, without the hidden ones, and those in `leave_out` within it.

    A link to a file is that file. Links to folders, links to nothing, pipes and the like are passed over, and named.
    Raises ValueError for a path that is neither a file nor a folder.
    """
    if not path.is_dir():
        if not path.is_file():
            raise ValueError(f"{path} is {_what(path)}; give a file, or a folder of files")
        return Entries((path,))
    root, out = path.resolve(), None if leave_out is None else leave_out.resolve()
    files, passed = [], []

    def unreadable(error: OSError) -> None:
        passed.append(f"{error.filename} (a folder that cannot be read: {error.strerror})")

    for name, folders, names in os.walk(path, onerror=unreadable):
        folder = Path(name)
        place = root / folder.relative_to(path)
        kept = [each for each in folders if not each.startswith(".") and place / each != out]
        folders[:] = [each for each in kept if not (folder / each).is_symlink()]
        passed += [f"{folder / each} (a link to a folder)" for each in kept if each not in folders]
        for entry in (folder / each for each in names if not each.startswith(".")):
            if entry.is_file():
                files.append(entry)
            else:
                passed.append(f"{entry} ({_what(entry)})")
    return Entries(tuple(sorted(files)), tuple(sorted(passed)))


def _what(entry: Path) -> str:
    """What an entry of a folder is that is no file."""
    if entry.is_symlink() and not entry.exists():
        return "a link to nothing"
    for what in ("fifo", "socket", "block_device", "char_device"):
        if getattr(entry, f"is_{what}")():
            return f"a {what.replace('_', ' ').replace('char ', 'character ')}"
    return "no file"


def first_words(text: str) -> str:
    """Two words with which the text begins, and a space: 40 characters at most; "" where there are none."""
    words = printable(text.removeprefix("\ufeff")[:1000]).split()[:2]
    return f"{' '.join(words)[:39]} " if words else ""


def _texts(files: Iterable[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...], int, str]:
    """Of the files those that hold text, those that hold something else, and the texts' bytes and SHA-256, each with its end."""
    texts, skipped, num_bytes, digest = [], [], 0, hashlib.sha256()
    for file in files:
        content = file.read_bytes().removeprefix(BOM)
        if _bad_byte(content) is not None or kind_of(file, "", given=False) is Kind.NONE:
            skipped.append(file)
        elif content:
            texts.append(file)
            num_bytes += len(content)
            digest.update(content + b"\xff")  # which no UTF-8 has
    return tuple(texts), tuple(skipped), num_bytes, digest.hexdigest()


def _first_words(files: Iterable[Path]) -> str:
    for file in files:
        with file.open(encoding="utf-8-sig") as opened:
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
