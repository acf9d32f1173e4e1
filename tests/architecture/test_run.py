"""The script `run`: how it splits its arguments, and its message without Python. Without nox, and with no installs."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.rules import ROOT
from tests.support.limits import PATIENCE

pytestmark = pytest.mark.every_value

ECHO = '#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n'
TOO_OLD = "#!/bin/sh\nexit 1\n"
PYTHON_NAMES = ("python3", "python3.11", "python3.12", "python3.13")


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with run and a ready .venv, whose python prints its arguments."""
    folder = tmp_path / "a checkout"
    write_script(folder / ".venv/bin/python", ECHO)
    for name in ("run", "noxfile.py", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(ROOT / "constraints.txt", folder / ".venv/constraints.txt")
    return folder


def run(checkout: Path, *arguments: str, python: str = ECHO, **settings: str) -> subprocess.CompletedProcess[str]:
    for name in PYTHON_NAMES:
        write_script(checkout / "bin" / name, python)
    environment = {**os.environ, "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", **settings}
    command = [str(checkout / "run"), *arguments]
    return subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, check=False, preexec_fn=heed_interrupts
    )


def heed_interrupts() -> None:
    """Handle SIGINT even if these tests ignore it, as in a shell that starts them in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("arguments", "sessions", "passed_on"),
    [
        pytest.param(["train"], ["train"], [], id="alone"),
        pytest.param(["train", "--data.path", "a b.txt"], ["train"], ["--data.path", "a b.txt"], id="dashes"),
        pytest.param(["train", "--", "--steps", "3"], ["train"], ["--steps", "3"], id="explicit"),
        pytest.param(["lint", "types"], ["lint", "types"], [], id="two-sessions"),
        pytest.param(["test", "tests/mesh", "-x"], ["test"], ["tests/mesh", "-x"], id="path"),
        pytest.param(
            ["layout", "dp: S(0), tp: S(1)", "--mesh", "dp=2,tp=2"],
            ["layout"],
            ["dp: S(0), tp: S(1)", "--mesh", "dp=2,tp=2"],
            id="a-layout",
        ),
        pytest.param(["layout", "", "--mesh", "dp=2"], ["layout"], ["", "--mesh", "dp=2"], id="an-empty-layout"),
        pytest.param(["lint", "train", "test"], ["lint", "train"], ["test"], id="after-one-that-nox-gives-way-to"),
        pytest.param(
            ["generate", "test", "--prompt", "x"], ["generate"], ["test", "--prompt", "x"], id="a-folder-named-test"
        ),
        pytest.param(["test", "-k", "train"], ["test"], ["-k", "train"], id="a-session-name-as-argument"),
    ],
)
def test_leading_session_names_are_run_and_the_rest_is_passed_on(
    checkout: Path, arguments: list[str], sessions: list[str], passed_on: list[str]
) -> None:
    done = run(checkout, *arguments)
    said = done.stdout.splitlines()
    assert said[said.index("-f") :] == ["-f", str(checkout / "noxfile.py"), "-s", *sessions, "--", *passed_on]
    assert done.returncode == 0


def test_without_arguments_the_sessions_are_listed(checkout: Path) -> None:
    done = run(checkout)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "--list"


INTERRUPTED = (130, "\nrun: interrupted\n")


def with_nox(checkout: Path, **sources: str) -> dict[str, str]:
    """A nox of these modules, and the settings with which it is found."""
    write_script(checkout / ".venv/bin/python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (checkout / "modules/nox").mkdir(parents=True)
    for name in ("__init__", "__main__"):
        (checkout / f"modules/nox/{name}.py").write_text(sources.get(name, ""))
    return {"PYTHONPATH": str(checkout / "modules")}


def test_ctrl_c_while_nox_is_imported_is_one_line(checkout: Path) -> None:
    """One line even where the module being imported would go on after a KeyboardInterrupt."""
    source = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    done = run(checkout, "test", **with_nox(checkout, __init__=source))
    assert (done.returncode, done.stderr) == INTERRUPTED


@pytest.mark.parametrize("arguments", [["test"], []], ids=["a-session", "the-list"])
def test_ctrl_c_while_python_starts_is_one_line(checkout: Path, arguments: list[str]) -> None:
    """Before its first line runs."""
    if subprocess.run(["env", "--block-signal=INT", "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("env is not GNU's of 2019 or newer, and blocks no signal")
    settings = with_nox(checkout)
    write_script(checkout / ".venv/bin/python", f'#!/bin/sh\nkill -INT $$\nexec "{sys.executable}" "$@"\n')
    done = run(checkout, *arguments, **settings)
    assert (done.returncode, done.stderr) == INTERRUPTED


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGINT)", INTERRUPTED, id="not-answered"),
        pytest.param("sys.exit(130)", INTERRUPTED, id="answered-by-nox"),
        pytest.param("sys.exit(1)", (1, ""), id="a-session-that-failed"),
    ],
)
def test_ctrl_c_in_nox_is_one_line(checkout: Path, end: str, expected: tuple[int, str]) -> None:
    source = f"import os, signal, sys\ndef main():\n    print('said')\n    {end}\n"
    done = run(checkout, "test", **with_nox(checkout, __main__=source))
    assert (done.returncode, done.stderr) == expected
    assert done.stdout == "said\n"


def test_ctrl_c_before_python_is_there_is_one_line(checkout: Path) -> None:
    write_script(checkout / "bin/cmp", "#!/bin/sh\nkill -INT $PPID\n")
    done = run(checkout, "test")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nrun: interrupted\n")


def beside_nox(checkout: Path, code: str) -> Path:
    """The checkout with this repository's nox, and with a session `wait` that runs the code."""
    nox = ROOT / ".venv/bin/python"
    if not nox.exists():
        pytest.skip("there is no nox here: ./run makes .venv, and was not used")
    write_script(checkout / ".venv/bin/python", f'#!/bin/sh\nexec "{nox}" "$@"\n')
    with (checkout / "noxfile.py").open("a") as file:
        file.write(f"\n\n@nox.session\ndef wait(session: nox.Session) -> None:\n    {code}\n")
    return checkout


def test_ctrl_c_in_a_session_before_its_command_is_one_line(checkout: Path) -> None:
    done = run(beside_nox(checkout, "os.kill(os.getpid(), signal.SIGINT)"), "wait")
    assert done.returncode == 130
    assert done.stderr.splitlines() == ["nox > Running session wait", "", "run: interrupted"]


def test_sigint_to_nox_alone_ends_the_command_that_it_waits_for(checkout: Path) -> None:
    sleeping = (
        "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "print(os.getpid(), flush=True); time.sleep(600)"
    )
    beside_nox(checkout, f"session.run({sys.executable!r}, '-c', {sleeping!r}, external=True)")
    with subprocess.Popen(
        [str(checkout / "run"), "wait"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        command = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert said.splitlines()[-2:] == ["", "run: interrupted"]
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(command, 0)


def test_an_unknown_session_is_named(checkout: Path) -> None:
    done = run(checkout, "tset")
    assert done.returncode == 2
    assert "run: tset is not a session" in done.stderr


def test_a_machine_without_python_is_told_what_to_install(checkout: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    done = run(checkout, "test", python=TOO_OLD)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "apt install python3 python3-venv" in line


@pytest.mark.parametrize("missing", ["constraints.txt", "bin/python"])
def test_a_half_made_venv_is_made_anew(checkout: Path, missing: str) -> None:
    (checkout / ".venv" / missing).unlink()
    done = run(checkout, "test")  # the python on PATH makes nothing here: only the request counts
    assert "Making .venv with nox" in done.stdout
    assert ["-m", "venv", "--clear", str(checkout / ".venv")] == done.stdout.splitlines()[1:5]
