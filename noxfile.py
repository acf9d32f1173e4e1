"""The commands of this repository. `./run NAME` runs a session; `./run` lists all sessions."""

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
PICTURE_TOOLS = ("vl-convert-python",)  # optional: without this tool benchmarks run, but draw no pictures
PYTEST = ("pytest", "pytest-timeout", "pytest-xdist", "pytest-benchmark")
# pip would compile all installed modules, which takes longer than the rest of the installation. Python compiles each
# module at its first import, unless forbidden to write bytecode.
LAZILY = () if sys.dont_write_bytecode else ("--no-compile",)
TIME_LIMIT = "--timeout=900"  # seconds for a test: ends a hanging test, but no test slowed down by other programs
# Each worker takes a file at a time, in the order of tests/conftest.py. pytest-xdist's own order would start with the
# files of the most tests. One worker more than cores, because tests of failures wait.
WORKERS = ("-n", str(min(4, 1 + (os.cpu_count() or 1))), "--dist", "loadgroup", "--no-loadscope-reorder")
DATA_TOOLS = ("tokenizers", "pyarrow", "jinja2")  # the packages of the extra weft-models[data]
MODEL_TOOLS = ("transformers", "accelerate", "peft", "trl", "tensorboard")
TEST_TOOLS = (*PYTEST, "hypothesis", "mypy", "beautifulsoup4", *MODEL_TOOLS, *DATA_TOOLS, *PICTURE_TOOLS)
DASHBOARD_TOOLS = (*PICTURE_TOOLS, "Jinja2")
DOCS_TOOLS = ("sphinx", "furo", "myst-parser")  # installed with torch, as Sphinx imports the packages for the reference
# Chromium must be installed on the machine.
BROWSER_TOOLS = (*DASHBOARD_TOOLS, *DOCS_TOOLS, *PYTEST, "playwright", "axe-playwright-python")

# VERSION: the arguments which `test_with` takes for versions. OF_TORCH: the packages which torch's wheels pin.
VERSION = re.compile(r"[A-Za-z][\w.-]*[=<>!~]=?\d")
OF_TORCH = re.compile("nvidia-|cuda-|setuptools")

# A program: imports every module of the given package, and prints the other packages loaded by these imports.
IMPORT_ALL = """
import importlib, pkgutil, sys
before = set(sys.modules)
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded - set(sys.stdlib_module_names) - {"weft"}))
"""

nox.options.default_venv_backend = "none"  # sessions share environments, so torch is installed once: see `_environment`

# Messages of nox to leave out: uv is not needed, and the script `run` reports interruptions.
UNSAID = ("uv binary not found", "Interrupted...", "interrupted.")
nox.logger.logger.addFilter(lambda record: not any(part in record.getMessage() for part in UNSAID))


@nox.session
def test(session: nox.Session) -> None:
    """Runs the tests, with a sample of the cases: minutes. Arguments go to pytest; without any, on several workers."""
    _pytest(session, *(session.posargs or WORKERS))


@nox.session
def test_exhaustive(session: nox.Session) -> None:
    """Runs the test cases left out by `test`; arguments go to pytest. Both sessions together run all tests."""
    _pytest(session, "-m", "exhaustive and not gpu", *(session.posargs or WORKERS))


@nox.session
def test_with(session: nox.Session) -> None:
    """Runs the tests with the given versions of packages, e.g. torch==2.11.0; further arguments go to pytest."""
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
    """Runs the tests for a GPU; fails on a machine without a GPU."""
    found = (
        "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 'no GPU: torch.cuda.is_available() is False')"
    )
    session.run(_weft(session), "-c", found)
    _pytest(session, "-m", "gpu", *session.posargs)


@nox.session
def measure_gpu(session: nox.Session) -> None:
    """On a GPU: runs the tests, measures the tables of products, runs the benchmarks. --dry-run lists the steps."""
    session.run(_weft(session), "-m", "benchmarks.measure_gpu", *session.posargs)


@nox.session
def test_first_hour(session: nox.Session) -> None:
    """Clones this repository and runs every command of the README, also those of the table of results: an hour."""
    _pytest(session, "-m", "first_hour", "--timeout=7200", *session.posargs)


@nox.session
def test_faults(session: nox.Session) -> None:
    """Kills ranks (WEFT_KILLS or 100 times), damages files (WEFT_FUZZ or 10,000), and more. Arguments go to pytest."""
    _pytest(session, "-m", "faults", "--timeout=14400", "--capture=no", *session.posargs)


@nox.session
def test_browser(session: nox.Session) -> None:
    """Tests the results page and the documentation in Chromium, which must be installed. CHROMIUM names the program."""
    python = _environment(session, "browser", list(BROWSER_TOOLS))
    only = ("--confcutdir=tests/browser", "-m", "browser")  # without tests/conftest.py, which needs torch
    session.run(python, "-m", "pytest", TIME_LIMIT, *only, "tests/browser", *(session.posargs or WORKERS))


@nox.session
def benchmark(session: nox.Session) -> None:
    """Runs the benchmarks; arguments go to pytest."""
    _pytest(session, "benchmarks", "--capture=no", "--timeout=1200", *session.posargs)


@nox.session
def benchmark_compare(session: nox.Session) -> None:
    """Compares a run of the benchmarks with earlier runs; arguments go to benchmarks/compare.py."""
    session.run(sys.executable, "-m", "benchmarks.compare", *session.posargs)  # the standard library is enough


@nox.session
def benchmark_keep(session: nox.Session) -> None:
    """Adds a benchmark run to benchmarks/results. Argument: the file written by `benchmark --benchmark-json`."""
    session.run(sys.executable, "-m", "benchmarks.history", "add", *session.posargs)


@nox.session
def benchmark_report(session: nox.Session) -> None:
    """Prints a run of the benchmarks as Markdown; arguments go to benchmarks/report.py."""
    session.run(sys.executable, "-m", "benchmarks.report", *session.posargs)


@nox.session
def dashboard(session: nox.Session) -> None:
    """Builds the results page of the benchmarks, dashboard/index.html; arguments go to benchmarks/dashboard."""
    python = _environment(session, "dashboard", list(DASHBOARD_TOOLS))
    session.run(python, "-m", "benchmarks.dashboard", *session.posargs)


@nox.session
def train(session: nox.Session) -> None:
    """Trains a model; arguments go to `weft train`, with paths relative to the current folder."""
    _give_way(session, "train")


@nox.session
def data(session: nox.Session) -> None:
    """Prepares text for training; arguments go to `weft data`."""
    _give_way(session, "data")


@nox.session
def generate(session: nox.Session) -> None:
    """Generates text with a trained model, or chats with it; arguments go to `weft generate`."""
    _give_way(session, "generate")


@nox.session
def evaluate(session: nox.Session) -> None:
    """Computes the loss of a model on examples; arguments go to `weft evaluate`."""
    _give_way(session, "evaluate")


@nox.session
def convert(session: nox.Session) -> None:
    """Converts a checkpoint to a folder for transformers, or back; arguments go to `weft convert`."""
    _give_way(session, "convert")


@nox.session
def explain(session: nox.Session) -> None:
    """Shows what training would do on any mesh, without training; arguments go to `weft explain`."""
    _give_way(session, "explain")


@nox.session
def plan(session: nox.Session) -> None:
    """Finds the fastest plan of a run on any chip, with a proof; arguments go to `weft plan`."""
    _give_way(session, "plan")


@nox.session
def check(session: nox.Session) -> None:
    """Compares training steps with files saved by explain; arguments go to `weft check`."""
    _give_way(session, "check")


@nox.session
def compare(session: nox.Session) -> None:
    """Tells whether two runs differ by rounding, and where they part; arguments go to `weft compare`."""
    _give_way(session, "compare")


@nox.session
def measure(session: nox.Session) -> None:
    """Measures this machine, for predictions of steps; arguments go to `weft measure`."""
    _give_way(session, "measure")


@nox.session
def layout(session: nox.Session) -> None:
    """Draws a layout, or plans a layout change; arguments go to `weft layout`."""
    _give_way(session, "layout")


@nox.session
def lint(session: nox.Session) -> None:
    """Checks rules and format with ruff; `./run lint --fix` repairs."""
    python = _environment(session, "lint", ["ruff"])
    session.run(python, "-m", "ruff", "check", *session.posargs)
    session.run(python, "-m", "ruff", "format", *(() if "--fix" in session.posargs else ("--check",)))


@nox.session
def types(session: nox.Session) -> None:
    """Checks types with mypy, in strict mode."""
    session.run(_weft(session), "-m", "mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the documentation in docs/_build/html; a warning is an error. Arguments go to sphinx-build."""
    python, pages = _weft(session), ROOT / "docs"
    built = pages / "_build" / "html"
    strict = ("-E", "-W", "--keep-going", "-q")  # -E rebuilds all pages: Sphinx does not notice changes of conf.py
    session.run(python, "-m", "sphinx", *strict, *session.posargs, str(pages), str(built))
    session.log(f"The first page is {built / 'index.html'}")


@nox.session
def wheels(session: nox.Session) -> None:
    """Builds the four wheels, and imports each wheel in an environment with only the declared dependencies.

    The wheels are installed into a single bare environment, in the order of their dependencies, and each is imported
    right after its installation. Later packages and their dependencies are not installed yet.
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
    """The python of the environment .nox/<name> with the four packages (editable) and their dependencies."""
    editable = [argument for package in PACKAGES for argument in ("-e", f"./packages/{package}")]
    return _environment(session, name, ["torch", "hatchling", "editables"], editable)


def _weft(session: nox.Session, name: str = "weft") -> str:
    """The python of `_packages`, after adding the tools for tests and documentation to the environment."""
    python = _packages(session, name)
    home = ROOT / ".nox" / name
    stamp, wanted = home / "tools", _digest((home / "installed").read_text(), *TEST_TOOLS, *DOCS_TOOLS)
    if not stamp.exists() or stamp.read_text() != wanted:
        session.log("Adding the tools for tests and documentation: about 100 MB to download.")
        session.run(*_install(python, _constraints(name)), *TEST_TOOLS, *DOCS_TOOLS)
        stamp.write_text(wanted)
    return python


def _environment(session: nox.Session, name: str, requirements: list[str], editable: list[str] | None = None) -> str:
    """The python of the environment .nox/<name> with `requirements` installed. pip runs only after a change.

    editable: further arguments of `pip install`, for packages installed from this repository.
    """
    home = ROOT / ".nox" / name
    python, stamp, constraints = home / "bin" / "python", home / "installed", _constraints(name)
    files = [constraints, *sorted(ROOT.glob("packages/*/pyproject.toml"))] if editable else [constraints]
    texts = [file.read_text() for file in files]
    wanted = _digest(sys.version, str(ROOT), *requirements, *(editable or []), *texts)
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    if not python.exists() or not stamp.exists():  # new, or an interrupted installation
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
    """The beginning of a `pip install` command, to which requirements are appended."""
    quiet = () if sys.stdout.isatty() else ("-q",)
    return (
        *(python, "-m", "pip", "--disable-pip-version-check", "install", *quiet, *LAZILY),
        *("-c", str(constraints)),
    )


def _constraints(name: str) -> Path:
    """The constraints of pip in .nox/<name>: constraints.txt, or .nox/<name>.txt if `test_with` wrote this file."""
    own = ROOT / ".nox" / f"{name}.txt"
    return own if own.exists() else CONSTRAINTS


def _name(requirement: str) -> str:
    """The package of a requirement: torch for `torch==2.13.0`."""
    return re.split("[=<>!~; ]", requirement, maxsplit=1)[0].lower()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _say_size(session: nox.Session, pip: tuple[str, ...], constraints: Path) -> None:
    """Asks pip which torch would be installed, and prints the size of the download.

    pip's report goes to a file: on stdout, pip also prints conflicts of versions, unless told to be quiet.
    """
    report = ROOT / ".nox" / "torch.json"
    options = ["install", "--dry-run", "--ignore-installed", "--report", str(report), "torch", "-c", str(constraints)]
    answer = subprocess.run((*pip, *options), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if answer.returncode:
        session.error(f"pip cannot install torch:\n{answer.stdout}")
    names = [package["metadata"]["name"] for package in json.loads(report.read_text())["install"]]
    # Sizes of all wheels which constraints.txt selects for `_packages`, on x86-64 with Python 3.11.
    if any(name.startswith("nvidia-") for name in names):
        session.log("Installing torch with CUDA: about 2.8 GB to download, unless pip has it cached.")
        if not shutil.which("nvidia-smi"):
            session.log("There is no NVIDIA driver here: PyTorch's CPU wheel would do, at a fifth of the size.")
    else:
        session.log("Installing torch for CPU: about 420 MB to download, unless pip has it cached; 1.7 GB on disk.")


def _pytest(session: nox.Session, *arguments: str, python: str | None = None) -> None:
    # Bytecode is written even if the user's shell forbids it. Without bytecode, each of a thousand processes would
    # compile Weft again, and each worker would compile the tests, in which pytest rewrites every assertion.
    environment = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": None}
    session.run(python or _weft(session), "-m", "pytest", TIME_LIMIT, *arguments, env=environment)


def _give_way(session: nox.Session, command: str) -> None:
    """Replaces the nox process by `weft COMMAND`, run in the user's current folder.

    So signals reach `weft`, and the exit status is the status of `weft`. No session can follow; the script `run` makes
    this session the last session of a call.
    """
    python = _packages(session)
    session.log(" ".join(["weft", command, *session.posargs]))
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(session.invoked_from)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until `weft` handles SIGINT
    arguments = (python, "-m", "weft.models.cli", command, *session.posargs)
    os.execve(python, arguments, {**os.environ, "WEFT_PROGRAM": "./run"})
