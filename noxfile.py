"""The commands of this repository: `./run NAME` runs a session, `./run` lists them."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
PACKAGES = ("mesh", "reshard", "kernels", "models")  # in the order of their dependencies
PICTURE_TOOLS = ("altair", "vl-convert-python")  # the benchmarks run without them, and draw nothing
PYTEST = ("pytest", "pytest-timeout", "pytest-xdist", "pytest-benchmark")
# pip would compile all of what it installs, which takes longer than the rest; Python compiles what is imported, if it may.
LAZILY = () if sys.dont_write_bytecode else ("--no-compile",)
TIME_LIMIT = (
    "--timeout=900"  # seconds of a test; it ends one that hangs, and none that many programs beside it slow down
)
WORKERS = ("-n", str(min(4, os.cpu_count() or 1)), "--dist", "loadgroup")
TEST_TOOLS = (*PYTEST, "hypothesis", "mypy", "transformers", *PICTURE_TOOLS)
DASHBOARD_TOOLS = (*PICTURE_TOOLS, "Jinja2")
BROWSER_TOOLS = (*DASHBOARD_TOOLS, *PYTEST, "playwright", "axe-playwright-python")  # Chromium itself is the machine's
DOCS_TOOLS = ("sphinx", "furo", "myst-parser")  # beside torch: the reference is read from the imported packages

# Imports every module of the package it is given, and prints what else was loaded.
IMPORT_ALL = """
import importlib, pkgutil, sys
before = set(sys.modules)
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded - set(sys.stdlib_module_names) - {"weft"}))
"""

nox.options.default_venv_backend = "none"  # torch is installed once, for all sessions that need it: see `_environment`

nox.logger.logger.addFilter(lambda record: "uv binary not found" not in record.getMessage())  # nor is it needed


@nox.session
def test(session: nox.Session) -> None:
    """The tests, of many cases a sample: minutes. Arguments go to pytest; without any, on several workers."""
    _pytest(session, *(session.posargs or WORKERS))


@nox.session
def test_exhaustive(session: nox.Session) -> None:
    """The cases that `test` leaves out; arguments go to pytest. Both together are all tests."""
    _pytest(session, "-m", "exhaustive and not gpu", *(session.posargs or WORKERS))


@nox.session
def test_gpu(session: nox.Session) -> None:
    """The tests that need a GPU; they fail where there is none."""
    found = (
        "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 'no GPU: torch.cuda.is_available() is False')"
    )
    session.run(_weft(session), "-c", found)
    _pytest(session, "-m", "gpu", *session.posargs)


@nox.session
def test_first_hour(session: nox.Session) -> None:
    """Clones this repository and types what its README shows, its table of results too: an hour."""
    _pytest(session, "-m", "first_hour", "--timeout=7200", *session.posargs)


@nox.session
def test_browser(session: nox.Session) -> None:
    """The tests of the results' page in Chromium; they fail where there is none. CHROMIUM names its program."""
    python = _environment(session, "browser", list(BROWSER_TOOLS))
    only = ("--confcutdir=tests/browser", "-m", "browser")  # the other conftest.py needs torch
    session.run(python, "-m", "pytest", TIME_LIMIT, *only, "tests/browser", *(session.posargs or WORKERS))


@nox.session
def benchmark(session: nox.Session) -> None:
    """The benchmarks; arguments go to pytest."""
    _pytest(session, "benchmarks", "--capture=no", "--timeout=1200", *session.posargs)


@nox.session
def benchmark_compare(session: nox.Session) -> None:
    """Compares a run of the benchmarks with those before it; arguments go to benchmarks/compare.py."""
    session.run(sys.executable, "-m", "benchmarks.compare", *session.posargs)  # the standard library is enough


@nox.session
def benchmark_keep(session: nox.Session) -> None:
    """Adds a run of the benchmarks to benchmarks/results; arguments: the file that --benchmark-json wrote."""
    session.run(sys.executable, "-m", "benchmarks.history", "add", *session.posargs)


@nox.session
def benchmark_report(session: nox.Session) -> None:
    """Prints a run of the benchmarks as Markdown; arguments go to benchmarks/report.py."""
    session.run(sys.executable, "-m", "benchmarks.report", *session.posargs)


@nox.session
def dashboard(session: nox.Session) -> None:
    """The page of the benchmarks' results in dashboard/index.html; arguments go to benchmarks/dashboard."""
    python = _environment(session, "dashboard", list(DASHBOARD_TOOLS))
    session.run(python, "-m", "benchmarks.dashboard", *session.posargs)


@nox.session
def train(session: nox.Session) -> None:
    """Trains a model; arguments go to `weft train`, paths count from where you stand."""
    _replace_by(session, _weft(session), "-m", "weft.models.cli", "train", *session.posargs)


@nox.session
def generate(session: nox.Session) -> None:
    """Lets a trained model go on with a text; arguments go to `weft generate`."""
    _replace_by(session, _weft(session), "-m", "weft.models.cli", "generate", *session.posargs)


@nox.session
def layout(session: nox.Session) -> None:
    """Draws a layout, or plans a change of one; arguments go to `weft layout`."""
    _replace_by(session, _weft(session), "-m", "weft.models.cli", "layout", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and format. `-- --fix` repairs."""
    python = _environment(session, "lint", ["ruff"])
    session.run(python, "-m", "ruff", "check", *session.posargs)
    session.run(python, "-m", "ruff", "format", *(() if "--fix" in session.posargs else ("--check",)))


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict."""
    session.run(_weft(session), "-m", "mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the documentation in docs/_build/html; a warning is an error. Arguments go to sphinx-build."""
    python, pages = _weft(session), ROOT / "docs"
    built = pages / "_build" / "html"
    strict = ("-E", "-W", "--keep-going", "-q")  # all pages anew: a change of conf.py is not seen otherwise
    session.run(python, "-m", "sphinx", *strict, *session.posargs, str(pages), str(built))
    session.log(f"The first page is {built / 'index.html'}")


@nox.session
def wheels(session: nox.Session) -> None:
    """Builds the four wheels, and imports each where nothing but its declared dependencies is installed.

    One bare environment grows by a wheel at a time, in the order of the dependencies: when a package is imported,
    those that depend on it, and what they alone need, are not there yet.
    """
    python = _environment(session, "wheels", ["hatchling"])
    dist, bare = ROOT / ".nox" / "dist", ROOT / ".nox" / "bare"
    shutil.rmtree(dist, ignore_errors=True)
    folders = [f"./packages/{name}" for name in PACKAGES]
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    session.run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(dist), *folders)
    session.run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(bare))
    _say_size(session, pip)
    try:
        for name in PACKAGES:
            (wheel,) = dist.glob(f"weft_{name}-*.whl")
            session.run(*pip, "--python", str(bare), "install", "-q", *LAZILY, "-c", str(CONSTRAINTS), str(wheel))
            command = (str(bare / "bin/python"), "-I", "-c", IMPORT_ALL, f"weft.{name}")
            loaded = session.run(*command, silent=True, log=False)
            session.log(f"weft.{name} imports alone")
            if name == "mesh" and str(loaded).strip():
                session.error(f"weft.mesh loads more than the standard library: {loaded}")
        session.run(str(bare / "bin/weft"), "--help", silent=True)
    finally:
        shutil.rmtree(bare, ignore_errors=True)


def _weft(session: nox.Session) -> str:
    """The python that has the four packages (editable), torch and the test tools."""
    editable = [argument for name in PACKAGES for argument in ("-e", f"./packages/{name}")]
    return _environment(session, "weft", ["torch", "hatchling", "editables", *TEST_TOOLS, *DOCS_TOOLS], editable)


def _environment(session: nox.Session, name: str, requirements: list[str], editable: list[str] | None = None) -> str:
    """The python of the environment .nox/<name>, which holds `requirements`; pip runs only where something changed."""
    home = ROOT / ".nox" / name
    python, stamp = home / "bin" / "python", home / "installed"
    files = [CONSTRAINTS, *sorted(ROOT.glob("packages/*/pyproject.toml"))] if editable else [CONSTRAINTS]
    wanted = [sys.version, str(ROOT), *requirements, *(editable or []), *(file.read_text() for file in files)]
    digest = hashlib.sha256("\0".join(wanted).encode()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == digest:
        return str(python)
    if not python.exists() or not stamp.exists():  # new, or interrupted half-way
        session.run(sys.executable, "-m", "venv", "--clear", str(home))
    stamp.unlink(missing_ok=True)
    pip = (str(python), "-m", "pip", "--disable-pip-version-check")
    quiet = () if sys.stdout.isatty() else ("-q",)
    if "torch" in requirements:
        _say_size(session, pip)
    install = (*pip, "install", *quiet, *LAZILY, "-c", str(CONSTRAINTS))
    session.run(*install, *requirements)
    if editable:
        session.run(*install, "--no-build-isolation", *editable)
    stamp.write_text(digest)
    return str(python)


def _say_size(session: nox.Session, pip: tuple[str, ...]) -> None:
    """Asks pip which torch it would take, and says what it weighs with all the rest."""
    options = ["install", "--dry-run", "--ignore-installed", "-q", "--report", "-", "torch", "-c"]
    answer = subprocess.run((*pip, *options, str(CONSTRAINTS)), cwd=ROOT, capture_output=True, text=True)
    if answer.returncode:
        session.error(f"pip cannot install torch:\n{answer.stderr}")
    names = [package["metadata"]["name"] for package in json.loads(answer.stdout)["install"]]
    # The sizes are those of all wheels that constraints.txt picks for .nox/weft on x86-64, Python 3.11.
    if any(name.startswith("nvidia-") for name in names):
        session.log("Installing torch with CUDA: about 2.8 GB to download, unless pip has it cached.")
        if not shutil.which("nvidia-smi"):
            session.log("There is no NVIDIA driver here: PyTorch's CPU wheel would do, at a fifth of the size.")
    else:
        session.log("Installing torch for CPU: about 450 MB to download, unless pip has it cached; 2 GB on disk.")


def _pytest(session: nox.Session, *arguments: str) -> None:
    session.run(_weft(session), "-m", "pytest", TIME_LIMIT, *arguments, env={"OMP_NUM_THREADS": "1"})


def _replace_by(session: nox.Session, *command: str) -> None:
    """Runs `command` where the user stands, with the user's terminal; where it fails, nox ends with its exit status."""
    session.log(" ".join(["weft", *command[3:]]))
    with subprocess.Popen(command, cwd=session.invoked_from, env={**os.environ, "WEFT_PROGRAM": "./run"}) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while True:
            try:
                status = process.wait()
                break
            except KeyboardInterrupt:  # Ctrl-C went to the command, too: wait for its own end
                continue
    if status:
        raise SystemExit(status if status > 0 else 128 - status)
