"""What `weft` does with its first argument: help, the version, or the command of that name, whose module is imported then."""

from __future__ import annotations

import difflib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from ..output import NotPrinted, printing
from ..terminal import INTERRUPTED, INTERRUPTED_STATUS, PROGRAM, one_line, wrapped

COMMANDS = ("train", "data", "generate", "convert", "explain", "layout")
WORKING = ("train", "data", "convert")  # those that print on the side
UNREAD_STATUS = 128 + signal.SIGPIPE  # as a shell gives it for other programs
HELP = f"""\
usage: {PROGRAM} COMMAND [ARGUMENTS]

Trains models on meshes of processes, and shows how tensors lie on them.

Commands
  train: train a model on a mesh
  data: make tokens of a text, and tokenizers
  generate: let a trained model go on with a text
  convert: make a checkpoint into a folder for transformers, or back
  explain: say what training would do on any mesh
  layout: draw who holds what of a tensor, and plan a change

Examples
  {PROGRAM} train --data.path book.txt
  {PROGRAM} train --mesh.dp 4 --steps 500
  {PROGRAM} explain --mesh.dp 64 --plan.zero 2
  {PROGRAM} layout "tp: S(0)" --mesh tp=4

{PROGRAM} COMMAND --help has examples, options and exit statuses. {PROGRAM} --version says what is installed.
"""


def call(command: str, arguments: Sequence[str]) -> int:
    """The exit status. Ctrl-C is a KeyboardInterrupt.

    Output that nobody reads, as of `| head -1`, gives the status of SIGPIPE, in silence. Output that cannot be written is one line
    and status 1. Neither has a part in a command that does other work.
    """
    try:
        with printing(ends=command not in WORKING):
            return _call(command, arguments)
    except NotPrinted as error:
        if isinstance(error.cause, BrokenPipeError):
            return UNREAD_STATUS
        print(f"{PROGRAM} {command}: the output cannot be written: {one_line(str(error))}", file=sys.stderr)
        return 1


def _call(command: str, arguments: Sequence[str]) -> int:
    if command in ("-h", "--help", "help"):
        print(wrapped(HELP, shutil.get_terminal_size().columns))
        return 0
    if command == "--version":
        print(_version())
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        print(f"{PROGRAM}: unknown command {command!r}; {hint}the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    with _ended_by_ctrl_c(command):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which a launcher may have put off until here
        module = import_module(f".{command}", __package__)
    status: int = module.run(list(arguments))
    return status


@contextmanager
def _ended_by_ctrl_c(command: str) -> Iterator[None]:
    """In it Ctrl-C, where it is heard, ends this process: what is imported may catch a KeyboardInterrupt, or lose it in a callback."""

    def end(*_: object) -> None:
        os.write(2, f"\n{PROGRAM} {command}: {INTERRUPTED}\n".encode())
        os._exit(INTERRUPTED_STATUS)

    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _version() -> str:
    """The version, and those of what it stands on, as a report of a fault needs them."""
    from ..versions import versions

    found = versions()
    others = ", ".join(f"{name} {found[name] or 'not installed'}" for name in ("torch", "triton", "python"))
    return f"weft {found['weft-models'] or 'not installed'} ({others})"
