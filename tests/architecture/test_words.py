"""Code is written in the words of its field: no identifier is a riddle, and prose names its nouns."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.architecture.rules import PACKAGES, ROOT, sources
from tests.architecture.words import (
    POINTING,
    comments_behind_breaks,
    listed_fields,
    pointing_words,
    prose,
    riddles,
    types,
)

# Names without a meaning: no value and no function has such a name.
PRONOUNS = {"they", "them", "those", "it"}
RIDDLES = PRONOUNS | {"told", "said", "lies", "brought", "went", "pull", "spread", "again", "kept", "asked", "taken"}
RIDDLES |= {"others", "made", "wholes", "gone", "given"}
# More of these words, which kernels still have.
MORE_RIDDLES = RIDDLES | {"mine", "theirs", "rest", "wanted", "got"}
# Words for where or when a value came, which weft.models has no more.
MODELS_RIDDLES = MORE_RIDDLES | {"ours", "whose", "whom", "alike", "there", "beside", "begun", "seen"}
# In Triton kernels and losses: the other columns' part of a sum, an unrounded number, ...
KERNEL_RIDDLES = RIDDLES | {"others", "others_low", "even", "true", "made", "words", "edges"}
LOSSES = {"cross_entropy", "linear_cross_entropy"}
KERNELS = [path for path in sources("kernels") if path.name in ("kernel.py", "row.py") or LOSSES & set(path.parts)]
MOST_POINTING = 40  # of 1,000 words


def riddles_of(path: Path) -> set[str]:
    """The riddles among a file's identifiers."""
    words = {"kernels": RIDDLES - {"given"}, "models": MODELS_RIDDLES - {"got"}}.get(package_of(path), MORE_RIDDLES)
    return riddles(path.read_text(), words | KERNEL_RIDDLES if path in KERNELS else words)


def package_of(path: Path) -> str:
    """The package of a source file, as "mesh"."""
    return path.relative_to(ROOT / "packages").parts[0]


@pytest.mark.every_value
@pytest.mark.parametrize("package", PACKAGES)
def test_there_are_no_riddles(package: str) -> None:
    found = {str(path.relative_to(ROOT)): riddles_of(path) for path in sources(package)}
    assert {path: names for path, names in found.items() if names} == {}


def test_kernels_and_losses_are_found() -> None:
    names = {"/".join(path.parts[-3:]) for path in KERNELS}
    assert len(names) > 30
    assert names >= {"kernels/rope/kernel.py", "cross_entropy/sharded/loss.py", "linear_cross_entropy/sharded/loss.py"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param("def _loss(pull):\n    others_low = pull", {"pull", "others_low"}, id="values"),
        pytest.param("class Made:\n    def made_ahead(self): ...", {"Made", "made_ahead"}, id="class-and-method"),
        pytest.param("class TensorMade:\n    MADE = 1", {"TensorMade", "MADE"}, id="capitals"),
        pytest.param("options.made_ahead(made_lse=1)", {"made_ahead", "made_lse"}, id="attribute-and-keyword"),
        pytest.param("nomade = pulley = 'made'  # made", set(), id="parts-of-words-and-text"),
    ],
)
def test_riddles_are_found(source: str, expected: set[str]) -> None:
    assert riddles(source, {"pull", "others", "made"}) == expected


def test_a_public_type_has_one_meaning() -> None:
    """No two modules, of any package, define public classes or aliases with the same name."""
    modules = defaultdict(list)
    for package in PACKAGES:
        for path in sources(package):
            for name in types(path.read_text()):
                modules[name].append(str(path.relative_to(ROOT)))
    assert len(modules) > 400
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}


def test_types_are_found() -> None:
    source = "Any_T = TypeVar('T')\nAlias = Literal['a']\nMOST = 3\n_B = int\nclass Class:\n    E = int\nclass _D: ..."
    assert types(source) == ["Alias", "Class"]


@pytest.mark.parametrize("package", PACKAGES)
def test_fields_have_a_line_each(package: str) -> None:
    """The text of a field stands at the field: no docstring lists two or more fields of its class."""
    found = {path: listed_fields(path.read_text()) for path in sources(package)}
    assert any(found.values()), "classes are found"
    listed = {f"{path.name}: {name}": fields for path, by in found.items() for name, fields in by.items()}
    assert {name: fields for name, fields in listed.items() if len(fields) > 1} == {}


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        pytest.param("A size.\n\n    size: in bytes.\n    unit, of: names.", ["size", "unit", "of"], id="lines"),
        pytest.param("A size. size: in bytes; unit: a name.", ["size", "unit"], id="sentences"),
        pytest.param("A size, as in `size: 3`.\n\n    Raises: an error.\n    other: no field.", [], id="none"),
    ],
)
def test_fields_in_docstrings_are_found(docstring: str, expected: list[str]) -> None:
    fields = "    size: int = 0\n    unit: str\n    of: str\n"
    classes = f'@dataclass(frozen=True)\nclass A:\n    """{docstring}"""\n{fields}class B(NamedTuple):\n{fields}'
    assert listed_fields(classes) == {"A": expected, "B": []}


def test_comments_stand_above_a_line_that_the_formatter_breaks() -> None:
    paths = [path for folder in ("packages", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): comments_behind_breaks(path.read_text()) for path in paths}
    assert len(found) > 900
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_comments_behind_breaks_are_found() -> None:
    broken = "x = f(\n    1\n)  # a comment\nif (\n    x\n):  #: a comment\n"
    whole = "x = f(1)  # a comment\ny = f(\n    1,\n    2,\n)  # a comment\nz = [\n    1\n]  # fmt: skip\n"
    assert comments_behind_breaks(broken + whole) == [3, 6]


@pytest.mark.parametrize("folder", [*(f"packages/{package}" for package in PACKAGES), "tests/support", "docs"])
def test_prose_names_its_nouns(folder: str) -> None:
    paths = [path for suffix in ("*.py", "*.md") for path in (ROOT / folder).rglob(suffix)]
    pointing, total = pointing_words(text for path in paths for text in prose(path))
    assert total > 1000, "the prose is found"
    assert 1000 * pointing / total < MOST_POINTING, f"{pointing} of {total} words are among {sorted(POINTING)}"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        pytest.param(
            "a.py", '"""It is one."""\n# what it is\nx = "it"  # noqa: it', (4, 6), id="docstring-and-comment"
        ),
        pytest.param("a.py", 'def f():\n    """Others use `it`."""\n    "so"', (1, 2), id="function"),
        pytest.param("a.md", "Such a `one` is\n```python\nit = 1\n```\nit.", (2, 4), id="page"),
    ],
)
def test_pointing_words_are_counted(name: str, content: str, expected: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert pointing_words(prose(tmp_path / name)) == expected
