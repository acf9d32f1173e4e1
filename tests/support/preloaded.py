"""`run` and `Popen` as in `subprocess`, for Python commands in forks of the pool's server, which has torch imported.

    done = preloaded.run((sys.executable, "-m", "weft.models.cli", "train"), cwd=folder)

Each command has separate descriptors, environment, folder and exit status. A fork server started by the command is a
fork of the command, so torch is imported there, too. Modules are imported before the command starts: a test of imports,
of Python's start or end, or of settings read by an import (PYTHONHASHSEED, WEFT_PROGRAM) uses `subprocess`.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.limits import PATIENCE
from tests.support.pool import PRELOADED, worker_environment

PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL


class Popen:
    """A running command. Arguments, attributes and methods as of `subprocess.Popen` with text=True."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int = DEVNULL,
        stdout: int | io.TextIOBase = DEVNULL,
        stderr: int | io.TextIOBase = DEVNULL,
        start_new_session: bool = False,
    ) -> None:
        python, how, *_ = self.args = tuple(command)
        assert python == sys.executable and how in ("-c", "-m"), "the server runs no other command"
        self.returncode: int | None = None
        self.stdout, out = _opened(stdout)
        self.stderr, err = (None, out) if stderr == STDOUT else _opened(stderr)
        streams = [_opened(stdin)[1], out, err]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        arguments = (self.args[1:], str(cwd or Path.cwd()), dict(os.environ if env is None else env), start_new_session)
        self._process = context.Process(target=_serve, args=(*arguments, *streams))
        with worker_environment():
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        for stream in {id(each): each for each in streams}.values():
            stream.close()

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the command's end; returns the unread text of standard output and of standard error."""
        texts = {"out": "", "err": ""}

        def read(name: str, stream: io.TextIOWrapper | None) -> None:
            texts[name] = stream.read() if stream is not None else ""

        threads = [
            threading.Thread(target=read, args=each, daemon=True)
            for each in (("out", self.stdout), ("err", self.stderr))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        return texts["out"], texts["err"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Popen:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def run(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: int = PIPE,
    stderr: int = PIPE,
    timeout: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """Run a command to the end. After `timeout` seconds, kill the command and raise `subprocess.TimeoutExpired`."""
    with Popen(command, cwd=cwd, env=env, stdout=stdout, stderr=stderr) as process:
        try:
            out, err = process.communicate(timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.wait(), out, err)


def _opened(stream: int | io.TextIOBase) -> tuple[io.TextIOWrapper | None, Connection]:
    """This process's end of a pipe, for PIPE; and the command's descriptor, as multiprocessing sends descriptors."""
    if stream == PIPE:
        reading, writing = os.pipe()
        return open(reading, encoding="utf-8"), Connection(writing)
    if stream == DEVNULL:
        return None, Connection(os.open(os.devnull, os.O_RDWR))
    return None, Connection(os.dup(stream if isinstance(stream, int) else stream.fileno()))


def _serve(
    command: tuple[str, ...],
    folder: str,
    environment: dict[str, str],
    is_session: bool,
    *streams: Connection,
) -> None:
    """The main function of the fork: becomes the command."""
    if is_session:
        os.setsid()
    for descriptor, stream in enumerate(streams):
        os.dup2(stream.fileno(), descriptor)
    for stream in streams:
        stream.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _open_standard_streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    util.spawnv_passfds = _fork_server  # type: ignore[assignment]
    status = _flushed(_status_of(command))
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _flushed(status: int) -> int:
    """The exit status, after Python's own last steps; the interpreter's end is left out, which takes torch a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    with suppress(AttributeError, ValueError, OSError):
        sys.stderr.flush()
    try:
        sys.stdout.flush()
    except (ValueError, OSError):
        traceback.print_exc()
        return 120  # Python's own exit status
    return status


def _status_of(command: tuple[str, ...]) -> int:
    """Runs `-m MODULE ARGUMENTS` or `-c CODE ARGUMENTS`; returns Python's exit status, or -SIGINT."""
    how, program, *arguments = command
    sys.argv = [how, *arguments]
    sys.path[0:0] = [""] if "" not in sys.path else []
    try:
        if how == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(compile(program, "<string>", "exec"), sys.modules["__main__"].__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback.print_exc()
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


KEPT: list[Any] = []  # streams of before a fork, whose buffers no fork writes


def _open_standard_streams() -> None:
    """Open sys.stdin, sys.stdout and sys.stderr on descriptors 0 to 2, as Python does at the start."""
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")
    KEPT.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    streams = []
    for descriptor, name in enumerate(("<stdin>", "<stdout>", "<stderr>")):
        stream = open(  # noqa: SIM115
            descriptor, "w" if descriptor else "r", encoding=encoding, closefd=False,
            errors="backslashreplace" if name == "<stderr>" else errors or None,
            buffering=1 if name == "<stderr>" or os.isatty(descriptor) else -1,
        )  # fmt: skip
        streams.append(stream)
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]  # Python flushes them as it ends


EXECUTE = util.spawnv_passfds


def _fork_server(path: bytes, arguments: list[str], descriptors: Sequence[int]) -> int:
    """Replaces multiprocessing's start of a helper process: forks a fork server, and executes every further helper."""
    code = arguments[-1]
    if "multiprocessing.forkserver" not in code:
        pid: int = EXECUTE(path, arguments, descriptors)
        return pid
    if pid := os.fork():
        return pid
    status = 1
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for each in map(int, os.listdir("/proc/self/fd")):
            if each > 2 and each not in descriptors:
                with suppress(OSError):  # the listing's own
                    os.close(each)
        _open_standard_streams()
        server = forkserver._forkserver
        type(server).__init__(server)  # the lock is held: the server was being started
        exec(code, {})
        status = 0
    except SystemExit:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
