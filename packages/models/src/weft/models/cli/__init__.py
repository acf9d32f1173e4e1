"""The `weft` command: a module for each of its commands, imported when it is called.

Until `main` answers Ctrl-C, Python does, by a traceback or in silence: so nothing but itself is imported before. The tens of
milliseconds in which Python itself starts stay: no package has a say before them. `./run` puts Ctrl-C off until they are over.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; exits with 0, with 1 where a run stopped, with 2 for input that cannot be used, with 130 by Ctrl-C."""
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        from .command import call

        status = call(command, rest)
    except (KeyboardInterrupt, RuntimeError) as error:
        # Python 3.11 makes a RuntimeError of what comes up while a class is made
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        from ..terminal import INTERRUPTED, INTERRUPTED_STATUS, PROGRAM

        print(f"\n{PROGRAM} {command}: {INTERRUPTED}", file=sys.stderr)
        exec(
            ""
        )  # Python ends by SIGINT where one has left an `exec`, as those of dataclasses, unless another went well
        status = INTERRUPTED_STATUS
    sys.exit(status)
