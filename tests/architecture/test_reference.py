"""The reference under docs/ has every public name of the four packages, once, and every name that a page imports."""

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.rules import PACKAGES, ROOT, sources
from tests.architecture.words import hidden_comments, records

pytestmark = pytest.mark.every_value


def public_names(source: str) -> list[str]:
    """The names that a module's source lists in `__all__`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


def documented_names(page: str) -> list[str]:
    """The full names that a page of the reference has Sphinx document."""
    return re.findall(r"^\.\. auto\w+:: (\S+)$", page, re.MULTILINE)


def imported_names(page: str) -> set[str]:
    """The full names that the Python blocks of a page import from weft."""
    blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    modules = [node for node in nodes if node.module is not None and node.module.startswith("weft.")]
    return {f"{node.module}.{name.name}" for node in modules for name in node.names}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.relative_to(ROOT).as_posix())
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    ],
)
def test_every_name_that_a_page_imports_is_in_the_reference(page: Path) -> None:
    reference = {name for each in (ROOT / "docs" / "api").glob("*.md") for name in documented_names(each.read_text())}
    assert imported_names(page.read_text()) <= reference


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package: str) -> None:
    module = f"weft.{package}"
    source = ROOT / "packages" / package / "src" / "weft" / package
    names = {f"{module}.{name}" for name in public_names((source / "__init__.py").read_text())}
    if package == "mesh":  # of its names one is a module
        names |= {f"{module}.infer.{name}" for name in public_names((source / "infer" / "__init__.py").read_text())}
    documented = documented_names((ROOT / "docs" / "api" / f"{package}.md").read_text())
    assert sorted(documented) == sorted({module} | names)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_shows_the_comments_of_fields(package: str) -> None:
    """Sphinx reads comments that begin with `#:`, and `setup` of docs/conf.py lists these with the fields' defaults."""
    pages = [page.read_text() for page in (ROOT / "docs" / "api").glob("*.md")]
    names = {name.rpartition(".")[2] for page in pages for name in documented_names(page)}
    texts = [path.read_text() for path in sources(package)]
    found = {name: hidden_comments(text, name) for text in texts for name in names & {*records(text)}}
    assert {key: fields for key, fields in found.items() if fields} == {}


def test_comments_hidden_from_the_reference_are_found() -> None:
    source = (
        "class A(NamedTuple):\n    b: int  # text\n    # text\n    c: int\n    d: int  #: text\n    #: text\n    e: int"
    )
    assert hidden_comments(source, "A") == ["b", "c"]
    assert hidden_comments(source, "B") == []


def test_public_and_documented_names_are_found() -> None:
    assert public_names('import a\n__all__ = ["b", "c"]\n') == ["b", "c"]
    assert imported_names("```python\nfrom weft.a import b, c\nimport torch\n```\n") == {"weft.a.b", "weft.a.c"}
    assert documented_names(".. automodule:: a\n\n.. autofunction:: a.b\n   :members:\n") == ["a", "a.b"]
