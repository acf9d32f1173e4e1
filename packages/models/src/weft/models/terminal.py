"""Printing to a terminal: safe texts, and streams whose failures cannot stop a run.

A text may hold control characters. Writing may fail: a pipe's reader goes away, the disk is full, the terminal closes,
or the encoding lacks a character.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

PROGRAM = os.environ.get("WEFT_PROGRAM", "weft")  # the command's name as typed by the user
INTERRUPTED = "interrupted; what was saved is whole"  # printed on Ctrl-C
INTERRUPTED_UNSAVED = "interrupted; nothing was saved"
INTERRUPTED_STATUS = 130  # a shell's exit status for SIGINT

_CONTROLS = re.compile(r"[^\S\n\t ]|[\x00-\x08\x0e-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Replaces control characters, which could move, colour or rename a terminal, by U+FFFD."""
    return _CONTROLS.sub("\ufffd", text)


def one_line(text: str) -> str:
    """Joins the text's lines by spaces, for an error, and replaces unprintable characters by U+FFFD."""
    return "".join(each if each.isprintable() else "\ufffd" for each in " ".join(text.splitlines()))


def gib(nbytes: float, digits: int = 2) -> str:
    """A number of bytes as text: "1.31 GiB"."""
    return f"{nbytes / 2**30:,.{digits}f} GiB"


def wrap_lines(text: str, width: int) -> str:
    """Wraps each line of the text to `width`, keeping the line's indent."""

    def of_line(line: str) -> str:
        indent = line[: len(line) - len(line.lstrip())]
        return textwrap.fill(line, width, subsequent_indent=indent)

    return "\n".join(map(of_line, text.splitlines()))


def install_command(package: str) -> str:
    """The command that installs a package for this interpreter: by pip or uv, whichever there is."""
    python, pip = shlex.quote(sys.executable), shutil.which("pip")
    if pip is not None and Path(pip).parent == Path(sys.executable).parent:
        return f"pip install {package}"
    if find_spec("pip") is None and shutil.which("uv") is not None:
        return f"uv pip install --python {python} {package}"
    return f"{python} -m pip install {package}"


class NotPrinted(Exception):
    """A command could not write the output asked for. cause: the operating system's error."""

    def __init__(self, cause: OSError | ValueError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class SafeStream:
    """Wraps a text stream: replaces characters outside the encoding by "?", and discards all output after an error.

    raises: whether the first error raises NotPrinted; otherwise errors are silent. Further attributes are the stream's.
    """

    def __init__(self, stream: TextIO, *, raises: bool) -> None:
        self._stream, self._raises = stream, raises

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes the text; returns its number of characters."""
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._discard(error)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._discard(error)

    def _discard(self, error: OSError | ValueError) -> None:
        with suppress(OSError, ValueError):  # the stream may have no descriptor
            _redirect_to_null(self._stream.fileno())
        if self._raises:
            raise NotPrinted(error) from error


@contextmanager
def printing(*, raises: bool) -> Iterator[None]:
    """Makes standard output a `SafeStream` with `raises`, and standard error a silent one, within the context."""
    streams = sys.stdout, sys.stderr
    begin_printing(raises=raises)
    try:
        yield
        sys.stdout.flush()
    except SystemExit:
        sys.stdout.flush()
        raise
    finally:
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams


def begin_printing(*, raises: bool = False) -> None:
    """As `printing`, until the process ends.

    Opens closed descriptors 0 to 2 on the null device; otherwise the next opened file would take such a number.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _redirect_to_null(descriptor)
    # Python sets sys.stdout or sys.stderr to None if its descriptor was closed at startup.
    out, error = (each or open(os.devnull, "w", encoding="utf-8") for each in (sys.stdout, sys.stderr))  # noqa: SIM115
    sys.stdout, sys.stderr = SafeStream(out, raises=raises), SafeStream(error, raises=False)


def can_show(text: str) -> bool:
    """Whether standard output's encoding has all characters of the text."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _redirect_to_null(descriptor: int) -> None:
    """Redirects a descriptor to the null device; child processes inherit the redirection."""
    null = os.open(os.devnull, os.O_RDWR)
    if null == descriptor:
        os.set_inheritable(null, True)
    else:
        os.dup2(null, descriptor)
        os.close(null)
