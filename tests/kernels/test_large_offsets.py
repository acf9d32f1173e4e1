"""Norms, rotary positions, gates and embeddings of rows beyond 32-bit offsets; see matmul/test_large_offsets.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from weft import kernels

from tests.kernels.matmul.test_large_offsets import apart
from tests.kernels.test_layers import LAYERS, operands

pytestmark = pytest.mark.usefixtures("interpreted")
ROWS, WIDTH = 3, 16
BY_ROWS = ("x", "y", "heads")  # operands whose rows are far apart


def found(op: Callable[..., Any], given: Sequence[Tensor], lay: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of the float operands; upstream gradients are laid out by `lay`."""
    leaves = [each.detach().requires_grad_(each.dtype == torch.bfloat16) for each in given]
    outputs = op(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [lay(torch.full_like(each, 1.0 + i)) for i, each in enumerate(outputs)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, wanted, upstream)]


@pytest.mark.parametrize("name", LAYERS)
def test_rows_apart(name: str) -> None:
    op, _, names = LAYERS[name]
    tables = ("cos", "sin")
    given = [
        each.to(torch.float32 if of in tables else torch.bfloat16)
        for of, each in zip(names.split(), operands(names, (ROWS,), WIDTH), strict=True)
    ]
    laid = [apart(each, 0) if of in BY_ROWS else each for of, each in zip(names.split(), given, strict=True)]
    assert laid[0].stride(0) * (ROWS - 1) > 2**31
    for one, other in zip(found(op, laid, lambda x: apart(x, 0)), found(op, given, lambda x: x), strict=True):
        assert torch.equal(one, other)


def test_rows_of_a_table() -> None:
    tokens, table = torch.tensor([2, 0, 2], dtype=torch.int32), operands("x", (ROWS,), WIDTH)[0].bfloat16()

    def rows(weight: Tensor) -> Tensor:
        return kernels.embedding(tokens, weight)

    for one, other in zip(
        found(rows, [apart(table, 0)], lambda x: apart(x, 0)), found(rows, [table], lambda x: x), strict=True
    ):
        assert torch.equal(one, other)


def test_a_dropped_row() -> None:
    x = operands("x", (ROWS,), WIDTH)[0].bfloat16()
    given, residual = (x, x + 1)
    dropped = kernels.dropout(apart(given, 0), 0.5, 7, residual=residual)
    assert torch.equal(dropped, kernels.dropout(given, 0.5, 7, residual=residual))
