"""Texts for the terminal: the program's name as the user called it, and safe output in the terminal's width."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

PROGRAM = os.environ.get("WEFT_PROGRAM", "weft")  # the command's name as typed by the user
INTERRUPTED = "interrupted; what was saved is whole"  # printed on Ctrl-C
INTERRUPTED_STATUS = 130  # a shell's exit status for SIGINT

_CONTROLS = re.compile(r"[^\S\n\t ]|[\x00-\x08\x0e-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Replaces control characters, which could move, colour or rename a terminal, by U+FFFD."""
    return _CONTROLS.sub("\ufffd", text)


def one_line(text: str) -> str:
    """Joins the text's lines by spaces, for an error, and replaces unprintable characters by U+FFFD."""
    return "".join(each if each.isprintable() else "\ufffd" for each in " ".join(text.splitlines()))


def wrapped(text: str, width: int) -> str:
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
