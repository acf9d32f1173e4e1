"""The reference under docs/ has every public name of the four packages, once, and no other."""

import ast
import re

import pytest

from tests.architecture.rules import PACKAGES, ROOT


def public_names(source: str) -> list[str]:
    """The names that a module's source lists in `__all__`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


def documented_names(page: str) -> list[str]:
    """The full names that a page of the reference has Sphinx document."""
    return re.findall(r"^\.\. auto\w+:: (\S+)$", page, re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package: str) -> None:
    module = f"weft.{package}"
    source = ROOT / "packages" / package / "src" / "weft" / package
    names = {f"{module}.{name}" for name in public_names((source / "__init__.py").read_text())}
    if package == "mesh":  # of its names one is a module
        names |= {f"{module}.infer.{name}" for name in public_names((source / "infer" / "__init__.py").read_text())}
    documented = documented_names((ROOT / "docs" / "api" / f"{package}.md").read_text())
    assert sorted(documented) == sorted({module} | names)


def test_public_and_documented_names_are_found() -> None:
    assert public_names('import a\n__all__ = ["b", "c"]\n') == ["b", "c"]
    assert documented_names(".. automodule:: a\n\n.. autofunction:: a.b\n   :members:\n") == ["a", "a.b"]
