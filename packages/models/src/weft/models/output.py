"""Standard output and error: what cannot be printed decides nothing that a run does.

A reader may go away, a disk may be full, a terminal may close, and an encoding may lack a character.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class NotPrinted(Exception):
    """Output could not be written, of a command whose work is that output. cause: the error of the system."""

    def __init__(self, cause: OSError | ValueError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Printing:
    """A stream of text that has a question mark for each character that its encoding lacks, and goes nowhere after an error.

    ends: whether the first error raises NotPrinted; without it all errors are silent. All else is as of the stream.
    """

    def __init__(self, stream: TextIO, *, ends: bool) -> None:
        self._stream, self._ends = stream, ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes the text; the number of its characters."""
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError) as error:  # a ValueError is of a stream that is closed
            self._lead_nowhere(error)
        return len(text)

    def flush(self) -> None:
        """Hands on what was written."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._lead_nowhere(error)

    def _lead_nowhere(self, error: OSError | ValueError) -> None:
        with suppress(OSError, ValueError):  # of what has no descriptor
            _open_nowhere(self._stream.fileno())
        if self._ends:
            raise NotPrinted(error) from error


@contextmanager
def printing(*, ends: bool) -> Iterator[None]:
    """Has standard output be a `Printing`, and standard error one that is silent; `ends` is of standard output."""
    streams = sys.stdout, sys.stderr
    begin_printing(ends=ends)
    try:
        yield
        sys.stdout.flush()
    except SystemExit:
        sys.stdout.flush()
        raise
    finally:
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams


def begin_printing(*, ends: bool = False) -> None:
    """As `printing`, for the life of this process. A descriptor that is closed is opened: else the next file would have it."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _open_nowhere(descriptor)
    # Python has no stream for a descriptor that was closed as it started.
    out, error = (each or open(os.devnull, "w", encoding="utf-8") for each in (sys.stdout, sys.stderr))  # noqa: SIM115
    sys.stdout, sys.stderr = Printing(out, ends=ends), Printing(error, ends=False)


def can_show(text: str) -> bool:
    """Whether the encoding of standard output has all characters of the text."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _open_nowhere(descriptor: int) -> None:
    """Has a descriptor, and those that processes started later inherit, lead to the null device."""
    null = os.open(os.devnull, os.O_RDWR)
    if null == descriptor:
        os.set_inheritable(null, True)
    else:
        os.dup2(null, descriptor)
        os.close(null)
