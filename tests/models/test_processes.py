"""Processes started together all end when a process, the starter or the fork server ends, however the end comes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.limits import PATIENCE

# A program with two arguments, a function's name and the function's argument. The program starts three processes,
# which call the function, and reports the failure of a process. The tests cannot start these processes themselves: a
# process has a single fork server for all children, and the fork server of the tests has torch loaded.
PROGRAM = """
import os, signal, sys, tempfile, time
from pathlib import Path
from weft.models.processes import ProcessFailed, run_together

PATIENCE = 5.0

def say(rank: int, argument: object) -> None:
    os.write(1, f"{argument} by {rank}\\n".encode())  # at once: lines do not mix

def sleep(rank: int, argument: str) -> None:
    say(rank, os.getpid())
    time.sleep(3600)

def compute(rank: int, argument: str) -> None:  # gives way to other threads of Python alone
    say(rank, os.getpid())
    while True:
        pass

def fail(rank: int, how: str) -> None:
    if rank == 1:
        exec(how)
    time.sleep(3600)

def linger(rank: int, argument: str) -> None:  # rank 1 ignores SIGTERM, rank 2 needs a moment to end
    signal.signal(signal.SIGTERM, [signal.SIG_DFL, signal.SIG_IGN, end][rank])
    say(rank, os.getpid())
    time.sleep(3600)

def end(signum: int, frame: object) -> None:
    time.sleep(0.5)
    say(2, "ended")
    sys.exit(0)

def stay(rank: int, argument: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1.0 if rank == 1 else 3600)
    sys.exit(7)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_together(globals()[sys.argv[1]], sys.argv[2], processes=3, folder=Path(folder), patience=PATIENCE)
        except ProcessFailed as failure:
            print(f"{failure.status}: {failure}", file=sys.stderr)
"""


# A program that starts a process, as a launcher does, and waits. The process shall end with the program.
LAUNCHER = """
import subprocess, sys
imports = "from weft.models.processes import end_with_parent"
computes = imports + "; end_with_parent(); print('there', flush=True)\\nwhile True: pass"
subprocess.run([sys.executable, "-c", computes])
"""


@contextmanager
def running(
    folder: Path, function: str = "sleep", ctrl_c: signal.Handlers = signal.SIG_DFL
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Run PROGRAM; yields the program and the ids of the three processes. Fails unless all four end.

    ctrl_c: the handler of SIGINT, as a shell sets it.
    """

    def answer() -> None:
        signal.signal(signal.SIGINT, ctrl_c)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which the tests may run, ignores SIGHUP

    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), function, ""]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=answer,
    ) as process:
        try:
            assert process.stdout is not None
            ranks = [int(process.stdout.readline().split()[0]) for _ in range(3)]
            yield process, ranks
            process.wait(PATIENCE)
            wait_for_the_end(process.pid)
        finally:
            os.killpg(process.pid, signal.SIGKILL) if of_session(process.pid) else None


def of_session(session: int) -> list[int]:
    """The ids of a session's living processes: the ranks, and the server that forks the ranks."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of, *_ = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(of) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_for_the_end(session: int) -> None:
    end = time.monotonic() + PATIENCE
    while left := of_session(session):
        assert time.monotonic() < end, f"these go on: {left}"
        time.sleep(0.05)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP], ids=lambda how: how.name
)
def test_processes_end_with_the_process_that_started_them(tmp_path: Path, how: signal.Signals) -> None:
    with running(tmp_path) as (process, _):
        process.send_signal(how)
    assert process.returncode != 0


def test_processes_that_compute_end_with_their_starter(tmp_path: Path) -> None:
    with running(tmp_path, "compute") as (process, _):
        process.kill()


@pytest.mark.few(1)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_a_process_of_a_launcher_ends_with_the_launcher(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == "there\n"
            launcher.send_signal(how)
            launcher.wait(PATIENCE)
            wait_for_the_end(launcher.pid)
        finally:
            os.killpg(launcher.pid, signal.SIGKILL) if of_session(launcher.pid) else None


def test_ctrl_c_ends_all_processes_with_one_traceback(tmp_path: Path) -> None:
    with running(tmp_path) as (process, _):
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()
    assert said.count("Traceback") == said.count("KeyboardInterrupt") == 1
    assert process.returncode == -signal.SIGINT


@pytest.mark.exhaustive  # the sample has a process that ignores SIGTERM after a failure of rank 1
def test_an_interrupted_program_gives_its_processes_patience_then_kills_them(tmp_path: Path) -> None:
    """Rank 1, which ignores SIGTERM, lives for PATIENCE seconds, and ends with the program."""
    with running(tmp_path, "linger") as (process, _):
        told = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "ended by 2\n"
        process.wait(PATIENCE)
        assert time.monotonic() - told >= 5.0
    assert process.returncode == -signal.SIGINT


@pytest.mark.exhaustive
def test_ctrl_c_is_ignored_where_a_shell_set_sig_ign(tmp_path: Path) -> None:
    with running(tmp_path, ctrl_c=signal.SIG_IGN) as (process, ranks):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.2)
        assert set(ranks) < set(of_session(process.pid))
        process.terminate()


def test_processes_end_with_their_fork_server(tmp_path: Path) -> None:
    with running(tmp_path) as (process, ranks):
        stat = Path(f"/proc/{ranks[0]}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        assert process.stderr is not None
        assert "exited with status 255; the other processes were ended" in process.stderr.read()


def said(folder: Path, *arguments: str) -> tuple[list[str], str]:
    """Run PROGRAM to the end: the sorted lines of the processes, and standard error. Fails unless all processes end."""
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        out, err = process.communicate(timeout=PATIENCE)
    wait_for_the_end(process.pid)
    return sorted(out.splitlines()), err


def test_each_process_gets_its_rank_and_the_arguments(tmp_path: Path) -> None:
    assert said(tmp_path, "say", "wörd") == (["wörd by 0", "wörd by 1", "wörd by 2"], "")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        pytest.param(
            "raise ValueError('no such thing')",
            r"1: rank 1 failed:\nTraceback [\s\S]*ValueError: no such thing\n",
            id="raises",
        ),
        pytest.param(
            "raise SystemExit(7)",
            "7: rank 1 exited with status 7; the other processes were ended",
            id="exits",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "os.abort()",
            "-6: rank 1 killed by SIGABRT; the other processes were ended",
            id="is-killed",
            marks=pytest.mark.exhaustive,
        ),
    ],
)  # fmt: skip
def test_a_failed_process_ends_all_processes_and_is_reported(tmp_path: Path, how: str, told: str) -> None:
    assert re.match(told, said(tmp_path, "fail", how)[1])


@pytest.mark.exhaustive
def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    assert said(tmp_path, "stay", "")[1].startswith("7: rank 1 exited with status 7")
