"""Dispatch on the first argument of `weft`: help, version, or a command. A command's module is imported when called."""

from __future__ import annotations

import difflib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from ..terminal import INTERRUPTED_STATUS, INTERRUPTED_UNSAVED, PROGRAM, NotPrinted, one_line, printing, wrap_lines

COMMANDS = (
    "train",
    "data",
    "generate",
    "evaluate",
    "convert",
    "explain",
    "plan",
    "measure",
    "check",
    "compare",
    "layout",
)
WORKING = ("train", "data", "convert", "measure")  # commands whose result is files, not their output
UNREAD_STATUS = 128 + signal.SIGPIPE  # as a shell reports a program ended by SIGPIPE
HELP = f"""\
usage: {PROGRAM} COMMAND [ARGUMENTS]

Trains models on meshes of processes, and shows how tensors are laid out on a mesh.

Commands
  train: train a model on a mesh
  data: turn text and examples into tokens, show them, and train tokenizers
  generate: continue a text with a trained model, or chat with it
  evaluate: compute the loss of a model on examples
  convert: convert a checkpoint to a folder for transformers, or back
  explain: show what a training step would do on any mesh
  plan: find the fastest plan of a run on any chip and number of processes, with a proof
  measure: measure this machine, for predictions
  check: compare training steps with files saved by explain
  compare: tell whether two runs differ by rounding, or where they part
  layout: draw which rank holds which part of a tensor, and plan a change

Examples
  {PROGRAM} train --data.path book.txt
  {PROGRAM} train --mesh.dp 4 --steps 500
  {PROGRAM} explain --mesh.dp 64 --plan.zero 2
  {PROGRAM} plan llama3-8b --processes 8 --chip h100 --batch 64,8192
  {PROGRAM} layout "tp: S(0)" --mesh tp=4

{PROGRAM} COMMAND --help shows examples, options and exit statuses. {PROGRAM} --version shows versions.
"""


def call(command: str, arguments: Sequence[str]) -> int:
    """Run a command and return its exit status. Ctrl-C raises KeyboardInterrupt, with the line to print or without.

    If output cannot be written, a command whose result is the output ends: after a closed pipe, as by `| head -1`,
    silently and with the status of SIGPIPE; after a different error with a line on stderr and status 1. The commands
    of `WORKING` continue.
    """
    try:
        with printing(raises=command not in WORKING):
            return _call(command, arguments)
    except NotPrinted as error:
        if isinstance(error.cause, BrokenPipeError):
            return UNREAD_STATUS
        print(f"{PROGRAM} {command}: the output cannot be written: {one_line(str(error))}", file=sys.stderr)
        return 1


def _call(command: str, arguments: Sequence[str]) -> int:
    """Run a command. `call` handles output that cannot be written."""
    if command in ("-h", "--help", "help"):
        print(wrap_lines(HELP, shutil.get_terminal_size().columns))
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
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a launcher may have blocked the signal until here
        module = import_module(f".{command}", __package__)
    status: int = module.run(list(arguments))
    return status


@contextmanager
def _ended_by_ctrl_c(command: str) -> Iterator[None]:
    """Context, for imports, in which Ctrl-C ends this process at once (unless the signal is ignored).

    A module being imported may catch KeyboardInterrupt, or lose the exception in a callback.
    """

    def end(*_: object) -> None:
        os.write(2, f"\n{PROGRAM} {command}: {INTERRUPTED_UNSAVED}\n".encode())
        os._exit(INTERRUPTED_STATUS)

    is_handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_handled:
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        if is_handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _version() -> str:
    """The versions of Weft, torch, triton and Python, for a bug report."""
    from ..versions import versions

    installed = versions()
    further_versions = ", ".join(
        f"{name} {installed[name] or 'not installed'}" for name in ("torch", "triton", "python")
    )
    return f"weft {installed['weft-models'] or 'not installed'} ({further_versions})"
