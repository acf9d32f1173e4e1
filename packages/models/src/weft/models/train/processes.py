"""Processes that start together and end together: with the first of them that fails, and with the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

GRACE_SECONDS = 2.0  # for the others to end by themselves once one has failed, and again once they are told to
LOOK_SECONDS = 0.5  # between two looks at who the parent is
RAISED = 1  # exit status of a process whose function raised


class ProcessFailed(RuntimeError):
    """A process ended with another status than 0; the message says which and how, with its traceback where it raised."""

    def __init__(self, rank: int, status: int, trace: str) -> None:
        self.status = status
        if trace:
            how = f"failed:\n{trace}"
        elif status < 0:
            how = f"killed by {signal.Signals(-status).name}; the other processes were ended"
        else:
            how = f"exited with status {status}; the other processes were ended"
        super().__init__(f"rank {rank} {how}")


def run_together(
    function: Callable[..., None],
    *arguments: Any,
    processes: int,
    folder: Path,
    preload: Sequence[str] = (),
    patience: float = GRACE_SECONDS,
) -> None:
    """Calls `function(rank, *arguments)` in each of `processes`, and waits until all have ended.

    function: of a module's top level; the arguments are pickled.
    folder: where the call and the reports of those that fail are written.
    preload: modules that are imported once, in the process that the others are forked from.
    patience: seconds that they have to end by themselves, once this one is interrupted and has told them to by SIGTERM.
    However this process ends, by a signal too, the others end with it: each waits for that in a thread of its own.
    Raises ProcessFailed for the first process that fails, with the others ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with _interrupts_blocked():
        forkserver.ensure_running()
    # In a file: a pipe might take no more of it before there is a process that reads.
    (folder / "call").write_bytes(pickle.dumps((function, arguments)))
    started: list[ForkServerProcess] = []
    grace = GRACE_SECONDS
    try:
        for rank in range(processes):
            started.append(context.Process(target=_call, args=(rank, str(folder))))
            started[-1].start()
        failed = _first_failure(started)
        if failed is not None:
            _wait(started, GRACE_SECONDS)
    except (KeyboardInterrupt, SystemExit):
        grace = patience
        raise
    finally:
        _end(started, grace)
    if failed is not None:
        report = _report(folder, failed)
        trace = report.read_text(encoding="utf-8") if report.exists() else ""
        raise ProcessFailed(failed, started[failed].exitcode or 0, trace)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """What is started here does not hear Ctrl-C, which goes to every process of the terminal; this process hears it after."""
    resource_tracker.ensure_running()  # not within: as it starts, Python 3.11 unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _first_failure(started: list[ForkServerProcess]) -> int | None:
    """The rank that ends first with another status than 0; None where all end with 0."""
    running = list(enumerate(started))
    while running:
        ready = wait([process.sentinel for _, process in running])
        for rank, process in running:
            if process.sentinel in ready:
                process.join()
                if process.exitcode != 0:
                    return rank
        running = [(rank, process) for rank, process in running if process.sentinel not in ready]
    return None


def _wait(started: list[ForkServerProcess], seconds: float) -> None:
    end = time.monotonic() + seconds
    for process in started:
        process.join(max(0.0, end - time.monotonic()))


def _end(started: list[ForkServerProcess], grace: float) -> None:
    """Ends those that still run: by SIGTERM, and after `grace` seconds by SIGKILL."""
    begun = [process for process in started if process.pid is not None]
    for process in begun:
        process.terminate()
    _wait(begun, grace)
    for process in begun:
        process.kill()


def _call(rank: int, folder: str) -> None:
    """The life of a process."""
    # The first to be done: a parent that is gone already ends it, too.
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was started by multiprocessing"
    _end_after(parent.join)  # the pipe is closed then that only the one that called `run_together` holds
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as a shell has it for what runs in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it in silence: its parent speaks for all
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        function, arguments = pickle.loads((Path(folder) / "call").read_bytes())
        function(rank, *arguments)
    except Exception:
        with suppress(FileNotFoundError):  # the folder went with the parent: nobody reads it
            _report(Path(folder), rank).write_text(traceback.format_exc(), encoding="utf-8")
        sys.exit(RAISED)


def end_with_parent() -> None:
    """Ends this process once the one that started it, which knows nothing of that, is gone, whatever this one does by then."""
    parent = os.getppid()

    def gone() -> None:
        while os.getppid() == parent:  # an orphan is given to another
            time.sleep(LOOK_SECONDS)

    _end_after(gone)


def _end_after(wait: Callable[[], object]) -> None:
    """Ends this process once `wait`, in a thread of its own, returns."""

    def end() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()


def _report(folder: Path, rank: int) -> Path:
    """Where a process leaves its traceback."""
    return folder / f"failed-{rank}"
