"""Forked processes give the results and the errors of a single process, and end with their parent's work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from weft.models.predict.forks import Forks, count_cores

from tests.support.limits import PATIENCE


def square(number: int) -> tuple[int, int]:
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number**2, os.getpid()


def end(number: int) -> int:
    if os.getpid() != PARENT:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


PARENT = os.getpid()


def meet(folder: Path, number: int) -> int:
    """Wait for the call of the other number, 0 or 1, which another process makes meanwhile."""
    (folder / str(number)).touch()
    while not (folder / str(1 - number)).exists():
        time.sleep(0.01)
    return os.getpid()


def test_each_result_is_of_its_call() -> None:
    with Forks(square, count=2) as forks:
        for number in range(20):
            forks.start(square, number)
        made = [forks.result(square, number) for number in reversed(range(20))]
    assert [value for value, _ in made] == [number**2 for number in reversed(range(20))]
    assert os.getpid() not in {process for _, process in made}


def test_calls_are_made_in_as_many_processes_as_are_given(tmp_path: Path) -> None:
    with Forks(meet, count=2) as forks:
        for number in range(2):
            forks.start(meet, tmp_path, number)
        processes = {forks.result(meet, tmp_path, number) for number in range(2)}
    assert len(processes) == 2 and os.getpid() not in processes


def test_with_a_count_of_1_no_process_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process is forked"))
    with Forks(square, count=1) as forks:
        forks.start(square, 3)
        assert not forks.has_room
        assert forks.take(square, 3) is None
        assert forks.result(square, 3) == (9, os.getpid())


def test_an_error_is_that_of_the_call_made_here() -> None:
    with Forks(square, count=2) as forks:
        forks.start(square, -3)
        with pytest.raises(ValueError, match="-3 is negative"):
            forks.result(square, -3)
        assert forks.result(square, 3)[0] == 9  # the process goes on


def test_what_an_ended_process_leaves_is_made_here() -> None:
    with Forks(end, square, count=2) as forks:
        for number in range(4):
            forks.start(end, number)
        assert [forks.result(end, number) for number in range(4)] == [0, 1, 2, 3]
        assert forks.result(square, 3) == (9, os.getpid())


def test_no_process_is_left() -> None:
    others = {*multiprocessing.active_children()}
    with pytest.raises(KeyboardInterrupt), Forks(square, time.sleep, count=2) as forks:
        assert forks.result(square, 1)[1] in {each.pid for each in multiprocessing.active_children()}
        for seconds in (60, 61, 62):
            forks.start(time.sleep, seconds)
        raise KeyboardInterrupt
    assert {*multiprocessing.active_children()} == others


# A shell's background jobs, and all programs begun by such a job, ignore Ctrl-C until they ask for the signal.
PROGRAM = """
import os, signal, sys, time
from weft.models.predict.forks import Forks
signal.signal(signal.SIGINT, signal.default_int_handler)
def wait():
    print(os.getpid(), flush=True)
    time.sleep(600)
with Forks(wait, count=2) as forks:
    print(os.getpid(), flush=True)
    forks.result(wait)
"""


def test_ctrl_c_ends_all_processes_with_the_error_of_the_program_alone() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as program:
        assert program.stdout is not None and program.stderr is not None
        _, child = (int(program.stdout.readline()) for _ in range(2))
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait(PATIENCE) == -signal.SIGINT
        assert program.stderr.read().count("Traceback") == 1
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_the_cores_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7})
    assert count_cores() == 3
