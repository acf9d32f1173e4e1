"""Runs a Python command as a user sees it: on a terminal of a given width, made by a pty."""

from __future__ import annotations

import os
import pty
import re
import termios
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tests.support import preloaded

ABOUT_TERMINALS = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "WEFT_PROGRAM")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without settings of terminals, and with `changes`."""
    inherited = {name: value for name, value in os.environ.items() if name not in ABOUT_TERMINALS}
    return {**inherited, "TERM": "xterm-256color", **changes}


def on_terminal(
    command: Sequence[str], *, columns: int = 80, start: Callable[..., Any] = preloaded.Popen, **changes: str
) -> tuple[int, str]:
    """The exit status of `command`, and its output to a terminal of `columns`. start: or `subprocess.Popen`."""
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (40, columns))
    with start(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment(**changes)) as process:
        os.close(terminal)
        sent = bytearray()
        with suppress(OSError):  # raised at the end, when the last process has closed the terminal
            while part := os.read(controller, 65536):
                sent += part
        status: int = process.wait()
    os.close(controller)
    return status, sent.decode().replace("\r\n", "\n")


def in_pipe(command: Sequence[str], **changes: str) -> tuple[int, str]:
    """The exit status of `command`, and its output to a pipe, errors included."""
    done = preloaded.run(command, env=environment(**changes), stderr=preloaded.STDOUT)
    return done.returncode, done.stdout
