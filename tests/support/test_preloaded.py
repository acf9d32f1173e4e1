"""A preloaded command has the streams, the environment and the exit status that a new process would have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import preloaded

PYTHON = (sys.executable, "-c")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "program",
    [
        pytest.param("print(1)", id="ends"),
        pytest.param("import sys; print(sys.argv[1:]); sys.exit(7)", id="status"),
        pytest.param("import sys; sys.exit('what is wrong')", id="message"),
        pytest.param("import sys; print('w\u00e4rp', file=sys.stderr)", id="stderr"),
        pytest.param("import os; print(os.getcwd(), os.environ['PLACE'])", id="place"),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", id="killed"),
        pytest.param("import atexit; atexit.register(print, 'last'); print('first')", id="atexit"),
        pytest.param("import threading; threading.Timer(0.1, print, (1,)).start()", id="thread"),
        pytest.param("print('x', end='')", id="buffered"),
        pytest.param("print(__name__)", id="main"),
    ],
)  # fmt: skip
def test_a_preloaded_command_ends_as_a_new_process_does(program: str, tmp_path: Path) -> None:
    command, environment = (*PYTHON, program, "an argument"), {**os.environ, "PLACE": "here"}
    done = preloaded.run(command, cwd=tmp_path, env=environment)
    expected = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (expected.returncode, expected.stdout, expected.stderr)


def test_an_exception_is_a_traceback_and_status_1() -> None:
    done = preloaded.run((*PYTHON, "raise ValueError('no such thing')"))
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("ValueError: no such thing\n")


def test_output_that_cannot_be_written_is_status_120() -> None:
    with open("/dev/full", "w") as full:
        assert preloaded.run((*PYTHON, "print(1)"), stdout=full.fileno()).returncode == 120


def test_the_encoding_is_that_of_the_environment() -> None:
    done = preloaded.run((*PYTHON, "import sys; print(sys.stdout.encoding)"), env={"PYTHONIOENCODING": "ascii"})
    assert done.stdout == "ascii\n"


def test_torch_is_there_already() -> None:
    assert preloaded.run((*PYTHON, "import sys; print('torch' in sys.modules)")).stdout == "True\n"


PARENT = """
import multiprocessing, sys

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([])
    processes = [context.Process(target=print, args=("torch" in sys.modules,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print([process.exitcode for process in processes])
"""


def test_processes_of_a_command_are_forks_of_the_command() -> None:
    done = preloaded.run((*PYTHON, PARENT))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["True", "True", "[0, 0]"]


def test_a_signal_reaches_the_command() -> None:
    program = "import time; print('there', flush=True); time.sleep(3600)"
    with preloaded.Popen((*PYTHON, program), stdout=preloaded.PIPE, stderr=preloaded.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in error


@pytest.mark.exhaustive
def test_a_command_beyond_its_timeout_is_killed() -> None:
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        preloaded.run((*PYTHON, "import time; time.sleep(3600)"), timeout=1.0)
    assert time.monotonic() - start < 60
