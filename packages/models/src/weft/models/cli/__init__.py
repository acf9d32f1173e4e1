"""The `weft` command. Every command of `weft` is a module of this package, imported when called.

Before `main` handles Ctrl-C, Python would answer with a traceback or end silently, so this module imports only sys.
No package can handle Ctrl-C in the tens of milliseconds in which Python itself starts; `./run` blocks the signal
then.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0, 1 if a run stopped, 2 for unusable input, 130 after Ctrl-C.

    arguments: the command and its arguments; None: those of the process.
    """
    command, *command_arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        from .command import call

        status = call(command, command_arguments)
    except (KeyboardInterrupt, RuntimeError) as error:
        # Python 3.11 turns an exception raised while a class is created into a RuntimeError
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        from ..terminal import INTERRUPTED, INTERRUPTED_STATUS, PROGRAM

        message = str(error) if isinstance(error, KeyboardInterrupt) else ""
        print(f"\n{PROGRAM} {command}: {message or INTERRUPTED}", file=sys.stderr)
        _forget_interrupt()
        status = INTERRUPTED_STATUS
    sys.exit(status)


def _forget_interrupt() -> None:
    """Makes Python exit with the status given to sys.exit, by an `exec` without an error.

    After a KeyboardInterrupt inside an `exec`, which dataclasses call, Python would end by SIGINT instead.
    """
    exec("")
