"""Unusual mixtures of documents under context parallelism, against float64: each document alone, on one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.mesh import ProcessMesh
from weft.models import lay_out_batch, parallelize
from weft.models.parallel.packed.exchange import RowOrders
from weft.reshard import GradientSync, to_global

from tests.models.cases import whole
from tests.models.test_packed_context import make, stepped

# Two rows of lengths each. A length of 0 is an id that no token has: a loader numbered a document without tokens.
MIXTURES = {
    "empty": ([0, 0, 5, 0, 0, 0, 40, 0, 1, 0, 18, 0, 0], [0, 64, *[0] * 50]),
    "one-token-each": ([1] * 64, [1] * 63 + [1]),
    "prime": ([2, 3, 5, 7, 11, 13, 17, 19, 23], [41, 37, 1, 2, 19]),  # 100 tokens, which 8 does not divide
}


def batch(mixture: str) -> tuple[dict[str, Tensor], list[tuple[int, slice]]]:
    """Rows of the mixture, and the row and tokens of each document that has tokens."""
    rows, generator = MIXTURES[mixture], torch.Generator().manual_seed(len(mixture))
    length = sum(rows[0])
    tokens, targets = (torch.randint(0, 31, (2, length), generator=generator) for _ in range(2))
    of_row = [torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) for lengths in rows]
    positions = [torch.cat([torch.arange(each) for each in lengths]) for lengths in rows]
    documents = [
        (row, slice(stop - each, stop))
        for row, lengths in enumerate(rows)
        for each, stop in zip(lengths, accumulate(lengths), strict=True)
        if each
    ]
    given = {"tokens": tokens, "targets": targets}
    return given | {"documents": torch.stack(of_row), "positions": torch.stack(positions)}, documents


def one_at_a_time(mixture: str, family: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The loss, the logits, and the gradient of each parameter."""
    model, (given, documents) = make(family).to(dtype), batch(mixture)
    loss, logits = torch.zeros((), dtype=dtype), torch.zeros(*given["tokens"].shape, 31, dtype=dtype)
    for row, place in documents:
        tokens = given["tokens"][row : row + 1, place]
        loss += stepped(model, tokens, given["targets"][row : row + 1, place])
        with torch.no_grad():
            logits[row, place] = model(tokens)[0]
    gradients: dict[str, Any] = {name: each.grad for name, each in model.named_parameters()}
    return {"loss": loss, "logits": logits} | gradients


def on_ranks(mixture: str, family: str, cp: int) -> dict[str, Tensor]:
    """As `one_at_a_time`, packed and cut by documents over cp ranks."""
    grid, model = ProcessMesh.grid(cp=cp), make(family)
    plan = replace(model.parallel_plan(), context="all_gather")
    parallelize(model, grid, plan)
    sync = GradientSync(model)
    laid = lay_out_batch(grid, plan, **batch(mixture)[0])
    assert isinstance(laid.order, RowOrders)
    inputs = {"positions": laid.positions, "documents": laid.documents}
    loss = stepped(model, laid.tokens, laid.targets, **inputs)
    sync.wait()
    gradients = {name: whole(each.grad) for name, each in model.named_parameters()}
    with torch.no_grad():
        logits = laid.as_read(to_global(model(laid.tokens, **inputs)))
    return {"loss": whole(loss), "logits": logits} | gradients


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "qwen", "capped"])
@pytest.mark.parametrize("cp", [2, 4, pytest.param(8, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_errors_are_those_of_float32_alone(mixture: str, cp: int, family: str, pool: Any) -> None:
    """At most twice the error of documents one at a time in float32, beside float64."""
    truth, eager = (one_at_a_time(mixture, family, dtype) for dtype in (torch.float64, torch.float32))
    for found in pool.run(on_ranks, mixture, family, cp, ranks=cp):
        for name, exact in truth.items():
            error, own = ((each[name].double() - exact).abs().max() for each in (found, eager))
            largest = float(exact.abs().max())  # 0 for the queries' weights, where each document has one token
            largest = largest if largest > 1e-12 else 1.0
            assert error <= 2 * own + 8 * torch.finfo(torch.float32).eps * largest, name
