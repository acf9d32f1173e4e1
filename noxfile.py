"""The commands of this repository: `./run NAME` runs a session, `./run` lists them."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
PACKAGES = ("mesh", "reshard", "kernels", "models")  # in the order of their dependencies
PICTURE_TOOLS = ("vl-convert-python",)  # the benchmarks run without them, and draw nothing
PYTEST = ("pytest", "pytest-timeout", "pytest-xdist", "pytest-benchmark")
# pip would compile all of what it installs, which takes longer than the rest; Python compiles what is imported, if it may.
LAZILY = () if sys.dont_write_bytecode else ("--no-compile",)
TIME_LIMIT = (
    "--timeout=900"  # seconds of a test; it ends one that hangs, and none that many programs beside it slow down
)
# A file at a time for each worker, in the order of tests/conftest.py: pytest-xdist would begin with those of the most tests.
WORKERS = ("-n", str(min(4, os.cpu_count() or 1)), "--dist", "loadgroup", "--no-loadscope-reorder")
DATA_TOOLS = ("tokenizers", "pyarrow")  # of the extra weft-models[data]
MODEL_TOOLS = ("transformers", "accelerate", "peft", "tensorboard")
TEST_TOOLS = (*PYTEST, "hypothesis", "mypy", "beautifulsoup4", *MODEL_TOOLS, *DATA_TOOLS, *PICTURE_TOOLS)
DASHBOARD_TOOLS = (*PICTURE_TOOLS, "Jinja2")
DOCS_TOOLS = ("sphinx", "furo", "myst-parser")  # beside torch: the reference is read from the imported packages
# Chromium itself is the machine's.
BROWSER_TOOLS = (*DASHBOARD_TOOLS, *DOCS_TOOLS, *PYTEST, "playwright", "axe-playwright-python")

# What `test_with` takes for a version, and what torch's wheels pin themselves.
VERSION = re.compile(r"[A-Za-z][\w.-]*[=<>!~]=?\d")
OF_TORCH = re.compile("nvidia-|cuda-|setuptools")

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

# What is not needed, uv, is not missed; and that a session was interrupted is said by `run`.
UNSAID = ("uv binary not found", "Interrupted...", "interrupted.")
nox.logger.logger.addFilter(lambda record: not any(part in record.getMessage() for part in UNSAID))


@nox.session
def test(session: nox.Session) -> None:
    """The tests, of many cases a sample: minutes. Arguments go to pytest; without any, on several workers."""
    _pytest(session, *(session.posargs or WORKERS))


@nox.session
def test_exhaustive(session: nox.Session) -> None:
    """The cases that `test` leaves out; arguments go to pytest. Both together are all tests."""
    _pytest(session, "-m", "exhaustive and not gpu", *(session.posargs or WORKERS))


@nox.session
def test_with(session: nox.Session) -> None:
    """The tests with other versions than constraints.txt picks, as torch==2.11.0; arguments that are no versions go to pytest."""
    versions = [each for each in session.posargs if VERSION.match(each)]
    if not versions:
        session.error("with which versions? As in: ./run test_with torch==2.11.0 triton==3.6.0")
    others = [each for each in session.posargs if each not in versions]
    named = {_name(each) for each in versions}
    kept = [
        line for line in CONSTRAINTS.read_text().splitlines() if _name(line) not in named and not OF_TORCH.match(line)
    ]
    (ROOT / ".nox").mkdir(exist_ok=True)
    (ROOT / ".nox" / "with.txt").write_text("\n".join([*kept, *versions, ""]))
    _pytest(session, *(others or WORKERS), python=_weft(session, "with"))


@nox.session
def test_gpu(session: nox.Session) -> None:
    """The tests that need a GPU; they fail where there is none."""
    found = (
        "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 'no GPU: torch.cuda.is_available() is False')"
    )
    session.run(_weft(session), "-c", found)
    _pytest(session, "-m", "gpu", *session.posargs)


@nox.session
def measure_gpu(session: nox.Session) -> None:
    """All that a GPU decides: its tests, the tables of products, the benchmarks. --dry-run says what it runs."""
    session.run(_weft(session), "-m", "benchmarks.measure_gpu", *session.posargs)


@nox.session
def test_first_hour(session: nox.Session) -> None:
    """Clones this repository and types what its README shows, its table of results too: an hour."""
    _pytest(session, "-m", "first_hour", "--timeout=7200", *session.posargs)


@nox.session
def test_faults(session: nox.Session) -> None:
    """Kills ranks of runs, 100 times or WEFT_KILLS, damages files, 10,000 or WEFT_FUZZ, and more at length; arguments go to pytest."""
    _pytest(session, "-m", "faults", "--timeout=14400", "--capture=no", *session.posargs)


@nox.session
def test_browser(session: nox.Session) -> None:
    """The tests of the results' page and of the documentation in Chromium; they fail without one. CHROMIUM names its program."""
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
    _give_way(session, "train")


@nox.session
def data(session: nox.Session) -> None:
    """Prepares text for training; arguments go to `weft data`."""
    _give_way(session, "data")


@nox.session
def generate(session: nox.Session) -> None:
    """Lets a trained model go on with a text; arguments go to `weft generate`."""
    _give_way(session, "generate")


@nox.session
def convert(session: nox.Session) -> None:
    """Makes a checkpoint into a folder for transformers, or back; arguments go to `weft convert`."""
    _give_way(session, "convert")


@nox.session
def explain(session: nox.Session) -> None:
    """Says what training would do on any mesh; arguments go to `weft explain`."""
    _give_way(session, "explain")


@nox.session
def layout(session: nox.Session) -> None:
    """Draws a layout, or plans a change of one; arguments go to `weft layout`."""
    _give_way(session, "layout")


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
    _say_size(session, pip, CONSTRAINTS)
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


def _packages(session: nox.Session, name: str = "weft") -> str:
    """The python that has the four packages (editable) and what they need: torch, first of all."""
    editable = [argument for package in PACKAGES for argument in ("-e", f"./packages/{package}")]
    return _environment(session, name, ["torch", "hatchling", "editables"], editable)


def _weft(session: nox.Session, name: str = "weft") -> str:
    """The python of `_packages`, with the tools for tests and documentation: torch is there once, for all."""
    python = _packages(session, name)
    home = ROOT / ".nox" / name
    stamp, wanted = home / "tools", _digest((home / "installed").read_text(), *TEST_TOOLS, *DOCS_TOOLS)
    if not stamp.exists() or stamp.read_text() != wanted:
        session.log("Adding the tools for tests and documentation: about 100 MB to download.")
        session.run(*_install(python, _constraints(name)), *TEST_TOOLS, *DOCS_TOOLS)
        stamp.write_text(wanted)
    return python


def _environment(session: nox.Session, name: str, requirements: list[str], editable: list[str] | None = None) -> str:
    """The python of the environment .nox/<name>, which holds `requirements`; pip runs only where something changed."""
    home = ROOT / ".nox" / name
    python, stamp, constraints = home / "bin" / "python", home / "installed", _constraints(name)
    files = [constraints, *sorted(ROOT.glob("packages/*/pyproject.toml"))] if editable else [constraints]
    texts = [file.read_text() for file in files]
    wanted = _digest(sys.version, str(ROOT), *requirements, *(editable or []), *texts)
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    if not python.exists() or not stamp.exists():  # new, or interrupted half-way
        session.run(sys.executable, "-m", "venv", "--clear", str(home))
    stamp.unlink(missing_ok=True)
    if "torch" in requirements:
        _say_size(session, (str(python), "-m", "pip", "--disable-pip-version-check"), constraints)
    session.run(*_install(str(python), constraints), *requirements)
    if editable:
        session.run(*_install(str(python), constraints), "--no-build-isolation", *editable)
    stamp.write_text(wanted)
    return str(python)


def _install(python: str, constraints: Path) -> tuple[str, ...]:
    """The command that installs what is put after it."""
    quiet = () if sys.stdout.isatty() else ("-q",)
    return (
        *(python, "-m", "pip", "--disable-pip-version-check", "install", *quiet, *LAZILY),
        *("-c", str(constraints)),
    )


def _constraints(name: str) -> Path:
    """What pip keeps to in .nox/<name>: constraints.txt, or what `test_with` has made of it."""
    own = ROOT / ".nox" / f"{name}.txt"
    return own if own.exists() else CONSTRAINTS


def _name(requirement: str) -> str:
    """Of `torch==2.13.0` torch."""
    return re.split("[=<>!~; ]", requirement, maxsplit=1)[0].lower()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _say_size(session: nox.Session, pip: tuple[str, ...], constraints: Path) -> None:
    """Asks pip which torch it would take, and says what it weighs with all the rest."""
    report = (
        ROOT / ".nox" / "torch.json"
    )  # not on stdout, where pip says what conflicts with what, unless it is told to be quiet
    options = ["install", "--dry-run", "--ignore-installed", "--report", str(report), "torch", "-c", str(constraints)]
    answer = subprocess.run((*pip, *options), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if answer.returncode:
        session.error(f"pip cannot install torch:\n{answer.stdout}")
    names = [package["metadata"]["name"] for package in json.loads(report.read_text())["install"]]
    # The sizes are those of all wheels that constraints.txt picks for `_packages` on x86-64, Python 3.11.
    if any(name.startswith("nvidia-") for name in names):
        session.log("Installing torch with CUDA: about 2.8 GB to download, unless pip has it cached.")
        if not shutil.which("nvidia-smi"):
            session.log("There is no NVIDIA driver here: PyTorch's CPU wheel would do, at a fifth of the size.")
    else:
        session.log("Installing torch for CPU: about 420 MB to download, unless pip has it cached; 1.7 GB on disk.")


def _pytest(session: nox.Session, *arguments: str, python: str | None = None) -> None:
    # What is compiled is kept, whatever the user's shell says: else each of a thousand processes compiles Weft again, and each
    # worker the tests, of which pytest rewrites every assertion.
    environment = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": None}
    session.run(python or _weft(session), "-m", "pytest", TIME_LIMIT, *arguments, env=environment)


def _give_way(session: nox.Session, command: str) -> None:
    """`weft` takes the place of nox, where the user stands: what is sent to the one reaches the other, and its end is theirs.

    It is the last session of a call: `run` sees to that.
    """
    python = _packages(session)
    session.log(" ".join(["weft", command, *session.posargs]))
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(session.invoked_from)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until `weft` is there to answer it
    arguments = (python, "-m", "weft.models.cli", command, *session.posargs)
    os.execve(python, arguments, {**os.environ, "WEFT_PROGRAM": "./run"})
