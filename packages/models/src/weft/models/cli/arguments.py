"""What the commands share: their arguments by tyro, and one line for input that cannot be used."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TypeVar

import tyro

from ..terminal import PROGRAM, one_line, wrapped

T = TypeVar("T")
SILENT_SECONDS = 15.0  # ten times what the processes of one launcher begin apart on busy cores


def parse(
    kind: type[T],
    arguments: Sequence[str],
    *,
    command: str,
    about: str,
    default: T | None = None,
    compact_below: int = 0,
    file: Path | None = None,
) -> T:
    """The arguments as a `kind`. Help, and mistakes that tyro finds, end the program, with status 0 and 2.

    command: with its leading arguments, as it stands in the usage.
    about: what `--help` says above the options: headings, and indented lines, which are wrapped.
    compact_below: columns of a terminal that is too narrow for descriptions beside the options; --help-verbose has them.
    file: that the arguments are of; a mistake in a file is a ValueError of one line.
    """
    if file is not None:
        return _parse_file(kind, arguments, default, file)
    width = shutil.get_terminal_size().columns
    on_terminal = sys.stdout.isatty() and sys.stderr.isatty()  # tyro asks the one, and writes to both
    tyro._experimental_options["utf8_boxes"] = on_terminal
    tyro._experimental_options["ansi_codes"] = on_terminal and not os.environ.get("NO_COLOR")
    try:
        return tyro.cli(
            kind,
            default=tyro.MISSING_NONPROP if default is None else default,
            args=arguments,
            prog=f"{PROGRAM} {command}",
            description=wrapped(about, width),
            compact_help=width < compact_below,
            console_outputs=speaks(),
            config=(tyro.conf.AvoidSubcommands,),  # a rope scaling that a recipe has not is not to be chosen here
        )
    except SystemExit as end:
        if end.code:
            _after_the_one_that_speaks()
        raise


def _parse_file(kind: type[T], arguments: Sequence[str], default: T | None, file: Path) -> T:
    tyro._experimental_options["utf8_boxes"] = tyro._experimental_options["ansi_codes"] = False
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said), _unwrapped():
            return tyro.cli(
                kind,
                default=tyro.MISSING_NONPROP if default is None else default,
                args=arguments,
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit:
        raise ValueError(f"config {file}: {_one_line(said.getvalue())}") from None


@contextmanager
def _unwrapped() -> Iterator[None]:
    """In it the terminal seems so wide that no line is wrapped: a number is not cut."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        os.environ.update({} if before is None else {"COLUMNS": before})


def _one_line(text: str) -> str:
    """What tyro says is wrong, without the heading above it and the help below it, which lines of dashes part."""
    parts = re.split(r"^\W*-{10,}\W*$", text, flags=re.MULTILINE)
    return " ".join(parts[min(1, len(parts) - 1)].split())


@contextmanager
def refusing(command: str) -> Iterator[None]:
    """Input that cannot be used is one line, and status 2; what goes wrong later keeps its traceback.

    Of the processes that a launcher such as torchrun has started, rank 0 says it; the others only what is wrong with them
    alone.
    """
    try:
        yield
    except ValueError as error:
        _after_the_one_that_speaks()
        print(f"{PROGRAM} {command}: {one_line(str(error))}", file=sys.stderr)
        sys.exit(2)


def speaks() -> bool:
    """Whether this process speaks for all that a launcher has started; without one, it is the only one."""
    return os.environ.get("RANK", "0") == "0"


def _after_the_one_that_speaks() -> None:
    """Waits until rank 0 has said the same, and its launcher ends this process for that."""
    if not speaks():
        time.sleep(SILENT_SECONDS)
