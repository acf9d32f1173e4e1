"""Four packages in one namespace, of one version, with files short enough to read."""

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.rules import MAX_LINES, PACKAGES, ROOT, sources

NOT_THERE = re.compile(r"pip install [^`,;\n]*\bweft-")  # as a package of an index


def project(package: str) -> dict[str, Any]:
    with (ROOT / "packages" / package / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["project"])


def versions_apart(projects: list[dict[str, Any]]) -> set[str]:
    """Versions, if there are several, and requirements of weft packages in any version but theirs."""
    versions = {project["version"] for project in projects}
    wanted = f"=={projects[0]['version']}"
    needs = {need for project in projects for need in project["dependencies"] if need.startswith("weft-")}
    return (versions if len(versions) > 1 else set()) | {need for need in needs if not need.endswith(wanted)}


def long_files(lines: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in lines.items() if count > MAX_LINES}


def test_weft_is_a_namespace() -> None:
    assert not list(ROOT.glob("packages/*/src/weft/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_types_are_marked_and_the_license_is_there(package: str) -> None:
    assert (ROOT / "packages" / package / "src" / "weft" / package / "py.typed").is_file()
    assert (ROOT / "packages" / package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_versions_are_in_lockstep() -> None:
    assert not versions_apart([project(package) for package in PACKAGES])


def test_versions_apart_are_caught() -> None:
    one = {"version": "1.0", "dependencies": []}
    assert versions_apart([one, {"version": "1.1", "dependencies": []}]) == {"1.0", "1.1"}
    assert versions_apart([one, {"version": "1.0", "dependencies": ["weft-mesh>=1.0"]}]) == {"weft-mesh>=1.0"}


def test_mesh_needs_nothing() -> None:
    assert project("mesh")["dependencies"] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_numpy_is_declared_where_objects_are_sent(package: str) -> None:
    """torch declares no dependency on numpy, but needs it for collectives of Python objects."""
    sends = any(re.search(r"\b\w+_object(_list)?\(", path.read_text()) for path in sources(package))
    assert any(need.startswith("numpy") for need in project(package)["dependencies"]) == sends


@pytest.mark.parametrize("package", PACKAGES)
def test_the_pages_say_from_where_to_install(package: str) -> None:
    """No package index has the packages yet."""
    page = (ROOT / "packages" / package / "README.md").read_text()
    assert f"./packages/{package}" in page
    assert not NOT_THERE.search(page)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/guides/data.md", *(f"packages/{each}/README.md" for each in PACKAGES)]
)
def test_an_install_line_has_the_folder_of_each_package_that_is_needed(page: str) -> None:
    """One command must name all folders, as no index has the packages; unless they are installed already."""
    text = (ROOT / page).read_text()
    lines = [
        re.findall(r"\./packages/(\w+)", line) for line in re.findall(r"pip install [^`\n]*", text) if "[" not in line
    ]
    for folders in filter(None, lines):
        for folder in folders:
            needs = {need.split("==")[0] for need in project(folder)["dependencies"] if need.startswith("weft-")}
            assert needs <= {f"weft-{each}" for each in folders[: folders.index(folder)]}
    assert any(lines) or "[" in text


def test_no_page_and_no_message_installs_what_an_index_does_not_have() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/src/**/*.py")]
    assert len(pages) > 100
    found = [page.relative_to(ROOT).as_posix() for page in pages if NOT_THERE.search(page.read_text())]
    assert found == []


def test_an_installation_from_an_index_is_caught() -> None:
    assert NOT_THERE.search("`pip install 'weft-models[data]'`") and NOT_THERE.search("pip install -U weft-mesh")
    assert not NOT_THERE.search("pip install ./packages/mesh ./packages/kernels, as weft-mesh is nowhere")


def test_models_are_those_there_are() -> None:
    described = project("models")["description"]
    folders = {path.parent.name for path in (ROOT / "packages/models/src/weft/models").glob("*/model.py")}
    named = {word.lower() for word in re.findall(r"Llama|Mixtral|Qwen|GPT", described)}
    assert named == {folder.removesuffix("_moe") for folder in folders}


def test_paddlenlp_9412_versions_that_are_stated_are_those_tested() -> None:
    """Versions that the tests run on."""
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("docs/**/*.md"),
    ]
    assert [page.name for page in pages if re.search(r"macOS|Windows", page.read_text())] == []
    assert all("Linux, Python 3.11 to 3.13" in page.read_text() for page in pages[:2])
    assert {project(package)["requires-python"] for package in PACKAGES} == {">=3.11,<3.14"}
    needs = {need for package in PACKAGES for need in project(package)["dependencies"] if need.startswith("torch")}
    assert needs == {"torch>=2.11,<2.16"}
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    for version in (pinned[1], importlib.metadata.version("torch")):
        assert 11 <= int(re.match(r"2\.(\d+)\.", version)[1]) < 16  # type: ignore[index]


def test_no_file_is_too_long() -> None:
    def lines(path: Path) -> int:
        return len(path.read_text().splitlines())

    paths = [path for package in PACKAGES for path in sources(package)]
    paths += [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    assert not long_files({str(path): lines(path) for path in paths})


def test_a_long_file_is_caught() -> None:
    assert long_files({"long.py": MAX_LINES + 1, "short.py": MAX_LINES}) == {"long.py": MAX_LINES + 1}


# Checks packages in forks, in each of which no other package was used before. torch is imported once for all forks,
# after the first fork: weft.models must not import torch.
LISTS = """
import importlib, os, sys, traceback

def check(package, reads_each):
    module = importlib.import_module(f"weft.{package}")
    listed = dir(module)
    assert {*module.__all__, "__name__", "__doc__"} <= set(listed), set(module.__all__) - set(listed)
    assert listed == sorted(listed)
    for name in listed if reads_each else ():
        getattr(module, name)

def in_a_fork(package, reads_each):
    if os.fork() == 0:
        try:
            check(package, reads_each)
            assert reads_each or "torch" not in sys.modules
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(package, os.waitstatus_to_exitcode(os.wait()[1]))

in_a_fork("models", reads_each=False)
import torch.distributed.tensor
for package in sys.argv[1:]:
    in_a_fork(package, reads_each=True)
"""


@pytest.mark.exhaustive
def test_each_package_lists_its_public_names() -> None:
    """All public names are listed before their first use, for tab completion; every listed name exists."""
    command = [sys.executable, "-c", LISTS, *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{package} 0" for package in ("models", *PACKAGES)], done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_its_version(package: str) -> None:
    module = importlib.import_module(f"weft.{package}")
    assert module.__version__ == importlib.metadata.version(f"weft-{package}")
    with pytest.raises(AttributeError, match=f"weft.{package}.* no .*'nothing'"):
        module.nothing  # noqa: B018


def test_the_version_is_not_read_before_it_is_asked_for() -> None:
    code = "import sys, weft.mesh, weft.models; assert 'importlib.metadata' not in sys.modules; weft.mesh.__version__"
    subprocess.run([sys.executable, "-c", code], check=True)
