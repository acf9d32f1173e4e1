"""Triton kernels are written in the words of their field."""

import ast
from pathlib import Path

import pytest

from tests.architecture.rules import sources

# What names of values were, that nobody guesses: the other columns' part of a sum, the upstream gradient, an unrounded number, ...
RIDDLES = {"others", "others_low", "pull", "even", "spread", "true", "made", "words", "edges"}
KERNELS = [path for path in sources("kernels") if path.name in ("kernel.py", "row.py")]


def names(source: str) -> set[str]:
    """Those of variables and arguments."""
    nodes = list(ast.walk(ast.parse(source)))
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.arg for node in nodes if isinstance(node, ast.arg)
    }


@pytest.mark.parametrize("path", [pytest.param(path, id=f"{path.parent.name}-{path.stem}") for path in KERNELS])
def test_a_kernel_has_no_riddles(path: Path) -> None:
    assert not names(path.read_text()) & RIDDLES


def test_kernels_and_riddles_are_found() -> None:
    assert len(KERNELS) > 5
    assert names("def _loss(pull):\n    others_low = pull") & RIDDLES == {"pull", "others_low"}
