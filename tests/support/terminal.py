"""A command as a user sees it: on a terminal of some width, by a pty."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import termios
from collections.abc import Sequence
from contextlib import suppress

ABOUT_TERMINALS = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "WEFT_PROGRAM")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what it says of terminals, and with `changes`."""
    kept = {name: value for name, value in os.environ.items() if name not in ABOUT_TERMINALS}
    return {**kept, "TERM": "xterm-256color", **changes}


def on_terminal(command: Sequence[str], *, columns: int = 80, **changes: str) -> tuple[int, str]:
    """The exit status of `command`, and what it has sent to a terminal of `columns`."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (40, columns))
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment(**changes)) as process:
        os.close(its)
        sent = bytearray()
        with suppress(OSError):  # the end of a terminal whose last process has closed it
            while part := os.read(ours, 65536):
                sent += part
    os.close(ours)
    return process.returncode, sent.decode().replace("\r\n", "\n")


def in_pipe(command: Sequence[str], **changes: str) -> tuple[int, str]:
    """The exit status of `command`, and what it has written to a pipe, errors too."""
    done = subprocess.run(
        command, env=environment(**changes), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout
