"""The `weft` command: a module for each of its commands, imported when it is called."""

from __future__ import annotations

import difflib
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from ..terminal import PROGRAM, wrapped

COMMANDS = ("train", "data", "generate", "convert", "explain", "layout")
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; exits with 0, with 1 where a run stopped, with 2 for input that cannot be used, with 130 by Ctrl-C."""
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(wrapped(HELP, shutil.get_terminal_size().columns))
        return
    if command == "--version":
        print(_version())
        return
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        print(f"{PROGRAM}: unknown command {command!r}; {hint}the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which a launcher may have put off until here
        status = import_module(f".{command}", __name__).run(rest)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\n{PROGRAM} {command}: interrupted; what was saved is whole", file=sys.stderr)
        status = 130  # as a shell gives it for SIGINT
    except BrokenPipeError:  # a pager or `head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        status = 1  # as rich ends then
    sys.exit(status)


def _version() -> str:
    """The version, and those of what it stands on, as a report of a fault needs them."""
    from ..versions import versions

    found = versions()
    others = ", ".join(f"{name} {found[name] or 'not installed'}" for name in ("torch", "triton", "python"))
    return f"weft {found['weft-models'] or 'not installed'} ({others})"
