"""Triton kernels, and all of the losses, are written in the words of their field."""

import ast
from pathlib import Path

import pytest

from tests.architecture.rules import sources

# Former names of values that nobody could guess: another shard's part of a sum, the upstream gradient, ...
RIDDLES = {"others", "others_low", "pull", "even", "spread", "true", "made", "words", "edges"}
LOSSES = {"cross_entropy", "linear_cross_entropy"}
PATHS = [path for path in sources("kernels") if path.name in ("kernel.py", "row.py") or LOSSES & set(path.parts)]


def riddles(source: str) -> set[str]:
    """Names of values, arguments, functions, classes and attributes that are riddles, or contain a riddle as a word."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {getattr(node, kind, None) for node in nodes for kind in ("id", "arg", "attr", "name")}
    return {name for name in names if isinstance(name, str) and RIDDLES & {name, *name.lower().split("_")}}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id="-".join(path.with_suffix("").parts[path.parts.index("kernels") + 4 :])) for path in PATHS],
)
def test_there_are_no_riddles(path: Path) -> None:
    assert not riddles(path.read_text())


def test_kernels_and_losses_are_found() -> None:
    names = {"/".join(path.parts[-3:]) for path in PATHS}
    assert len(names) > 40
    assert names >= {"kernels/rope/kernel.py", "cross_entropy/sharded/loss.py", "linear_cross_entropy/sharded/input.py"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param("def _loss(pull):\n    others_low = pull", {"pull", "others_low"}, id="values"),
        pytest.param("class Made:\n    def made_ahead(self): ...", {"Made", "made_ahead"}, id="class-and-method"),
        pytest.param("options.made_ahead(true_lse=1)", {"made_ahead", "true_lse"}, id="attribute-and-keyword"),
        pytest.param("event = spreadsheet = True", set(), id="parts-of-words"),
    ],
)
def test_riddles_are_found(source: str, expected: set[str]) -> None:
    assert riddles(source) == expected
