"""Processes of this machine that start together and end together.

All end when one fails, and when their parent ends. `launch` runs training processes this way.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

LOOPBACK = "lo"  # the network interface that other machines cannot reach
GRACE_SECONDS = 2.0  # for processes to end by themselves after a failure, and again after SIGTERM
LOOK_SECONDS = 0.5  # between two looks whether the parent still exists
RAISED = 1  # exit status of a process whose function raised an exception


class ProcessFailed(RuntimeError):
    """A process ended with a nonzero status.

    The message names the rank and the cause: the traceback of an exception, a signal, or an exit status.
    """

    def __init__(self, rank: int, status: int, trace: str) -> None:
        self.status = status
        if trace:
            how = f"failed:\n{trace}"
        elif status < 0:
            how = f"killed by {signal.Signals(-status).name}; the other processes were ended"
        else:
            how = f"exited with status {status}; the other processes were ended"
        super().__init__(f"rank {rank} {how}")


def is_launched(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of a world: RANK and WORLD_SIZE are set. A shell may have a RANK of its own."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def run_together(
    function: Callable[..., None],
    *arguments: Any,
    processes: int,
    folder: Path,
    preload: Sequence[str] = (),
    patience: float = GRACE_SECONDS,
) -> None:
    """Call `function(rank, *arguments)` in each of `processes` new processes, and wait until all have ended.

    function: defined at the top level of a module. The function and the arguments are pickled.
    folder: for the pickled call and the tracebacks of failed processes.
    preload: modules to import once, in the fork server.
    patience: seconds from SIGTERM to SIGKILL when this process is interrupted (KeyboardInterrupt, SystemExit). When a
    process fails, GRACE_SECONDS apply instead.
    If this process ends, even by SIGKILL, all end: a thread in each waits for the parent's end.
    Raises ProcessFailed for the first failure, after ending all processes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with _interrupts_blocked():
        forkserver.ensure_running()
    # In a file, because a pipe may fill up before any process reads.
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


def listen_on_loopback() -> None:
    """Sets the variables by which gloo and NCCL choose an interface, unless set already or without a loopback.

    For processes of this machine alone: by default gloo and NCCL's bootstrap listen on an interface that other machines
    may reach.
    """
    if LOOPBACK in (name for _, name in socket.if_nameindex()):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, LOOPBACK)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Context in which SIGINT is blocked, for starting the fork server.

    The server, and all processes forked from the server, start with SIGINT blocked. Ctrl-C reaches every process of
    the terminal; this process handles the signal after the context.
    """
    # before the block, because starting the tracker unblocks SIGINT in Python 3.11
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _first_failure(started: list[ForkServerProcess]) -> int | None:
    """The rank of the first process with a nonzero exit status; None if all end with 0."""
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
    """Wait until all processes have ended, at most `seconds`."""
    end = time.monotonic() + seconds
    for process in started:
        process.join(max(0.0, end - time.monotonic()))


def _end(started: list[ForkServerProcess], grace: float) -> None:
    """End the remaining processes: by SIGTERM, and after `grace` seconds by SIGKILL."""
    with_pid = [process for process in started if process.pid is not None]
    for process in with_pid:
        process.terminate()
    _wait(with_pid, grace)
    for process in with_pid:
        process.kill()


def _call(rank: int, folder: str) -> None:
    """The main function of each process: run the pickled call; after an exception, write the traceback to a file."""
    # First of all: the parent may be gone already, and this process then ends.
    parent = multiprocessing.parent_process()
    assert parent is not None, "multiprocessing started this process"
    # join() returns when the parent is gone: it waits for a pipe held open by the parent alone
    _end_after(parent.join)
    # a shell sets SIG_IGN for background jobs
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # end silently: the parent prints the message for all
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        function, arguments = pickle.loads((Path(folder) / "call").read_bytes())
        function(rank, *arguments)
    except Exception:
        # the parent is gone and has removed the folder: nobody reads the traceback
        with suppress(FileNotFoundError):
            _report(Path(folder), rank).write_text(traceback.format_exc(), encoding="utf-8")
        sys.exit(RAISED)


def end_with_parent() -> None:
    """End this process once the parent is gone, whatever this process is doing then.

    Called in a process started by torchrun, srun or mpirun. Unlike `run_together`, these launchers give the process no
    pipe to wait for, so a thread looks at the parent's id every LOOK_SECONDS.
    """
    parent = os.getppid()

    def wait_for_orphaning() -> None:
        while os.getppid() == parent:  # an orphan gets another parent
            time.sleep(LOOK_SECONDS)

    _end_after(wait_for_orphaning)


def _end_after(wait: Callable[[], object]) -> None:
    """Start a thread to call `wait`, then kill this process."""

    def end() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()


def _report(folder: Path, rank: int) -> Path:
    """The file for the traceback of a failed process."""
    return folder / f"failed-{rank}"
