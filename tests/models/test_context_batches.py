"""Batches under context parallelism: laid out, put back as they are read, and refused where they do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models import ParallelPlan, lay_out_batch, parallelize
from weft.models.layers import DotProductAttention, Embedding
from weft.reshard import layout_of, to_global

from tests.models.test_context import KINDS, batch, make


def logits_as_read(kind: str) -> tuple[Tensor, str]:
    grid = ProcessMesh.grid(dp=2, cp=2)
    model = make()
    plan = replace(model.parallel_plan(), context=kind)
    parallelize(model, grid, plan)
    tokens = batch(11)["tokens"]
    rows = Layout(grid, {"dp": Shard(0)}).local_slices(tokens.shape, torch.distributed.get_rank())[0]
    laid = lay_out_batch(grid, plan, tokens[rows], rows=len(tokens))
    logits = model(laid.tokens, positions=laid.positions)
    return laid.as_read(to_global(logits)).detach(), str(layout_of(logits))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_put_back_as_the_tokens_are_read(kind: str, pool: Any) -> None:
    expected = make()(batch(11)["tokens"]).detach()
    for logits, layout in pool.run(logits_as_read, kind, ranks=4):
        assert layout == "dp: S(0), cp: S(1)"
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


def test_on_one_process_a_batch_is_as_it_was_given() -> None:
    given = batch(8, packed=True)
    laid = lay_out_batch(ProcessMesh.grid(cp=1), ParallelPlan(context="all_gather"), **given)
    assert laid.order is None
    assert all(getattr(laid, name) is tensor for name, tensor in given.items())


class Bare(torch.nn.Module):
    """A user's model that attends and takes tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(31, 8)
        self.attend = DotProductAttention(4, name="attend")

    def forward(self, tokens: Tensor, positions: Any = None) -> Tensor:
        x = self.table(tokens)
        return self.attend(x, x, x)


def given_badly() -> list[str]:
    grid = ProcessMesh.grid(dp_replica=1, dp_shard=2, cp=2)
    plan = ParallelPlan(context="all_gather")
    tokens = batch(8)["tokens"]
    messages = []
    for run in (
        lambda: lay_out_batch(grid, plan, tokens, rows=3),
        lambda: lay_out_batch(grid, plan, tokens, tokens[:2]),
        lambda: lay_out_batch(grid, plan, tokens[0]),
    ):
        with pytest.raises(ValueError) as caught:
            run()
        messages.append(str(caught.value))
    model = parallelize(Bare(), grid, plan)
    laid = lay_out_batch(grid, plan, tokens)
    assert str(layout_of(laid.tokens)) == "dp_replica: S(0), dp_shard: S(0), cp: S(1)"
    with pytest.raises(ValueError) as caught:
        model(laid.tokens, positions=laid.positions)
    return [*messages, str(caught.value)]


def test_a_batch_that_does_not_fit_is_named(pool: Any) -> None:
    for rank, messages in enumerate(pool.run(given_badly, ranks=4)):
        rows = "0 to 2" if rank < 2 else "2 to 3"
        assert f"of 3 rows rank {rank} has {rows}, " in messages[0]
        assert messages[0].endswith("but was given 3; give those, or all rows without rows=")
        assert messages[1] == "lay_out_batch: targets are (2, 8), but the tokens are (3, 8)"
        assert messages[2] == "lay_out_batch takes tokens [B, T], got (8,)"
        assert "beside the documents, which Bare.forward does not take; add documents=None" in messages[3]
