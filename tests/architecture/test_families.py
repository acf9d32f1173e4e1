"""A family of models is a folder of fixed files and a line of one table, and shares layers instead of copying them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import weft.models
from weft.models.families import FAMILIES

from tests.architecture.rules import ROOT, is_within
from tests.architecture.test_imports import imports_within
from tests.architecture.test_reference import public_names

SOURCE = ROOT / "packages/models/src/weft/models"
FILES = {"__init__.py", "config.py", "model.py", "weights.py"}
FOLDERS = {family.folder for family in FAMILIES.values()}
RECIPES = {"weft.models.published", "weft.models.train.recipes"}  # modules that list each family: named sizes


def definitions(source: str) -> Iterator[tuple[str, str]]:
    """Names and bodies, without docstrings, of classes, functions and methods of more than one statement."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if len(body) > 1:
                yield node.name, "\n".join(map(ast.dump, body))


def copies(of_families: Mapping[str, str]) -> list[str]:
    """Definitions that several families share. of_families: each family's source."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for family, source in of_families.items():
        for name, body in definitions(source):
            found[body].setdefault(family, name)
    return [
        " and ".join(f"{family}.{name}" for family, name in names.items()) for names in found.values() if len(names) > 1
    ]


def test_a_family_is_a_folder_of_the_same_files() -> None:
    assert {path.parent.name for path in SOURCE.glob("*/weights.py")} == FOLDERS
    for folder in FOLDERS:
        assert {path.name for path in (SOURCE / folder).iterdir() if path.name != "__pycache__"} == FILES, folder
    guide = (ROOT / "docs/guides/model.md").read_text()
    assert {*re.findall(r"^\| `(\w+\.py)` \|", guide, re.MULTILINE)} == FILES - {"__init__.py"}


def test_the_packages_names_of_families_are_those_of_the_table() -> None:
    """Type checkers read `__all__` and the imports above it, so both are written out."""
    source = (SOURCE / "__init__.py").read_text()
    names = {name: f"weft.models{home}" for family in FAMILIES.values() for name, home in family.names.items()}
    assert names.keys() <= set(public_names(source))
    assert not names.keys() & weft.models._HOMES.keys()
    for name, home in names.items():
        assert getattr(weft.models, name).__module__ == home
    written = {
        alias.name: f"weft.models.{node.module}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in FOLDERS
        for alias in node.names
    }
    assert written == names


def test_a_family_is_known_from_the_table_alone() -> None:
    """No further module imports a family, except the package's names and the recipes; no family imports another."""
    for module, others in imports_within("models").items():
        own = {folder for folder in FOLDERS if is_within(module, f"weft.models.{folder}")}
        taken = {folder for folder in FOLDERS for other in others if is_within(other, f"weft.models.{folder}")}
        assert taken <= own or module in {"weft.models", *RECIPES}, module


def test_families_share_layers_instead_of_copying_them() -> None:
    whole = {folder: "\n".join(path.read_text() for path in (SOURCE / folder).glob("*.py")) for folder in FOLDERS}
    assert copies(whole) == []


def test_a_copy_is_caught() -> None:
    one = 'class MLP:\n    """Of one."""\n    def forward(self, x):\n        y = x + 1\n        return y\n'
    other = "class Feed:\n    size = 2\n    def forward(self, x):\n        y = x + 1\n        return y\n"
    assert copies({"one": one, "other": other}) == ["one.forward and other.forward"]
    assert copies({"one": one, "other": "def plan(self):\n    return PLAN\n"}) == []
