"""What this package says on a terminal, whoever prints it: how the user has called it, and text that fits and is safe to show."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

PROGRAM = os.environ.get("WEFT_PROGRAM", "weft")  # how the user has called this program
INTERRUPTED = "interrupted; what was saved is whole"  # by Ctrl-C
INTERRUPTED_STATUS = 130  # as a shell gives it for SIGINT

_CONTROLS = re.compile(r"[^\S\n\t ]|[\x00-\x08\x0e-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text with U+FFFD for control characters, by which a terminal would be moved, coloured or renamed."""
    return _CONTROLS.sub("\ufffd", text)


def one_line(text: str) -> str:
    """The text in one line, as an error is printed: a space for each break of a line, U+FFFD for all that no terminal shows."""
    return "".join(each if each.isprintable() else "\ufffd" for each in " ".join(text.splitlines()))


def wrapped(text: str, width: int) -> str:
    """The text with its lines wrapped, each with its own indent."""

    def of_line(line: str) -> str:
        indent = line[: len(line) - len(line.lstrip())]
        return textwrap.fill(line, width, subsequent_indent=indent)

    return "\n".join(map(of_line, text.splitlines()))


def install_command(package: str) -> str:
    """What the user types to install a package where this interpreter finds it: by the pip or the uv that there is."""
    python, pip = shlex.quote(sys.executable), shutil.which("pip")
    if pip is not None and Path(pip).parent == Path(sys.executable).parent:
        return f"pip install {package}"
    if find_spec("pip") is None and shutil.which("uv") is not None:
        return f"uv pip install --python {python} {package}"
    return f"{python} -m pip install {package}"
