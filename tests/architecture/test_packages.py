"""Four packages in one namespace, one version, files of a size to be read."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.rules import MAX_LINES, PACKAGES, ROOT, sources


def project(package: str) -> dict[str, Any]:
    with (ROOT / "packages" / package / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["project"])


def versions_apart(projects: list[dict[str, Any]]) -> set[str]:
    """More than one version, and requirements of another weft package that are not that version."""
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


def test_no_file_is_too_long() -> None:
    def lines(path: Path) -> int:
        return len(path.read_text().splitlines())

    assert not long_files({str(path): lines(path) for package in PACKAGES for path in sources(package)})


def test_a_long_file_is_caught() -> None:
    assert long_files({"long.py": MAX_LINES + 1, "short.py": MAX_LINES}) == {"long.py": MAX_LINES + 1}
