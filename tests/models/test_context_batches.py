"""Batches under context parallelism: laid out, put back into reading order, and refused where sizes do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models import GPT, GPTConfig, ParallelPlan, forward_backward, initialize, lay_out_batch, parallelize
from weft.models.layers import DotProductAttention, Embedding
from weft.reshard import distribute, layout_of, to_global

from tests.models.test_context import CONFIG, KINDS, batch, make


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


@pytest.mark.exhaustive
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
    """A user's model with attention, whose forward takes tokens alone."""

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
        assert messages[0].endswith(f"but was given 3 rows; give rows {rows}, or all rows without rows=")
        assert messages[1] == "lay_out_batch: targets are (2, 8), but the tokens are (3, 8)"
        assert messages[2] == "lay_out_batch takes tokens [B, T], got (8,)"
        assert "with the argument documents, which Bare.forward does not take; add documents=None" in messages[3]


def without_positions(kind: str, family: str, packed: bool, compiled: bool = False) -> list[Tensor]:
    """Logits in reading order: of the laid-out batch without positions, then of tokens in reading order."""
    grid = ProcessMesh.grid(cp=2)
    model = make() if family == "llama" else small_gpt()
    plan = replace(model.parallel_plan(), context=kind)
    parallelize(model, grid, plan)
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    given = batch(11, packed)
    given.pop("positions", None)
    laid = lay_out_batch(grid, plan, **given)
    found = [laid.as_read(to_global(called(laid.tokens, documents=laid.documents)))]
    natural = distribute(given["tokens"], Layout(grid, {"cp": Shard(1)}))
    documents = distribute(given["documents"], Layout(grid)) if packed else None
    positions = distribute(torch.arange(11).expand(given["tokens"].shape), Layout(grid, {"cp": Shard(1)}))
    found.append(to_global(called(natural, positions=positions, documents=documents)))
    return [each.detach() for each in found]


def small_gpt() -> GPT:
    model = GPT(GPTConfig(vocab_size=CONFIG.vocab_size, hidden_size=16, num_layers=2, num_heads=2, max_seq_len=16))
    initialize(model, seed=0)
    return model


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_carry_their_order_into_a_model_without_positions(
    kind: str, family: str, packed: bool, pool: Any
) -> None:
    given = batch(11, packed)
    expected = (make() if family == "llama" else small_gpt())(given["tokens"], documents=given.get("documents"))
    for found in pool.run(without_positions, kind, family, packed, ranks=2):
        for logits in found:
            torch.testing.assert_close(logits, expected.detach(), rtol=0, atol=2e-6)


@pytest.mark.exhaustive  # a model is compiled twice
def test_a_compiled_model_tells_the_orders_of_tokens_apart(pool: Any) -> None:
    expected = make()(batch(11)["tokens"]).detach()
    for found in pool.run(without_positions, "all_gather", "llama", False, True, ranks=2):
        for logits in found:
            torch.testing.assert_close(logits, expected, rtol=0, atol=2e-6)


def logits_of_a_copy(kind: str, packed: bool) -> tuple[Tensor, Tensor | str, Tensor]:
    """Logits of a batch; of a copy of the tokens alone, or the error; of the copy beside the batch's positions."""
    model, grid = make(), ProcessMesh.grid(cp=2)
    plan = replace(model.parallel_plan(), context=kind)
    parallelize(model, grid, plan)
    laid = lay_out_batch(grid, plan, **batch(11, packed))
    copy = laid.tokens.clone()
    documents = laid.documents
    expected = to_global(model(laid.tokens, positions=laid.positions, documents=documents)).detach()
    try:
        alone: Tensor | str = to_global(model(copy, documents=documents)).detach()
    except ValueError as error:
        alone = str(error)
    return expected, alone, to_global(model(copy, positions=laid.positions, documents=documents)).detach()


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
def test_a_copy_of_the_tokens_without_their_order_is_refused(packed: bool, pool: Any) -> None:
    for expected, alone, beside_positions in pool.run(logits_of_a_copy, "all_gather", packed, ranks=2):
        assert isinstance(alone, str) and "(a copy of the tokens of lay_out_batch has none)" in alone, alone
        assert "positions=batch.positions" in alone
        assert torch.equal(beside_positions, expected)


def told_compiled() -> list[str]:
    """The errors of a compiled model: for a copy of the tokens, for positions without the tokens' order, and for a plan
    without context.
    """
    grid, found = ProcessMesh.grid(cp=2), []
    plan = replace(make().parallel_plan(), context="all_gather")
    laid = lay_out_batch(grid, plan, **batch(11))
    positions = distribute(torch.arange(11).expand(batch(11)["tokens"].shape), Layout(grid, {"cp": Shard(1)}))
    for tokens, given, context in (
        (laid.tokens.clone(), None, "all_gather"),
        (laid.tokens, positions, "all_gather"),
        (laid.tokens, None, None),
    ):
        model = parallelize(make(), grid, replace(plan, context=context))
        try:
            torch.compile(model, backend="aot_eager", fullgraph=True)(tokens, positions=given)
        except Exception as error:
            found.append(str(error))
    return found


@pytest.mark.exhaustive  # a model is compiled
def test_a_compiled_model_tells_what_is_missing(pool: Any) -> None:
    for copy, beside, without in pool.run(told_compiled, ranks=2):
        assert "tokens of Llama are (Shard(dim=1),)" in copy, copy
        assert "call Llama with positions=batch.positions" in copy
        assert "but the positions carry no order; give the positions to lay_out_batch" in beside, beside
        assert "(Shard(dim=1),), but the plan has context=None" in without, without


def test_ulysses_keeps_the_reading_order_in_a_copy(pool: Any) -> None:
    for expected, alone, beside_positions in pool.run(logits_of_a_copy, "ulysses", False, ranks=2):
        assert torch.equal(alone, expected) and torch.equal(beside_positions, expected)


class WithoutPositions(Bare):
    """A user's model with attention, whose forward takes no positions."""

    def forward(self, tokens: Tensor, documents: Any = None) -> Tensor:  # type: ignore[override]
        x = self.table(tokens)
        return self.attend(x, x, x, documents=documents)


def without_the_argument() -> list[Tensor]:
    """Outputs in reading order: of a laid-out batch, and of tokens in reading order beside their positions."""
    torch.manual_seed(0)
    model, grid, plan = WithoutPositions(), ProcessMesh.grid(cp=2), ParallelPlan(context="all_gather")
    torch.nn.init.normal_(model.table.weight)
    tokens = batch(11)["tokens"]
    alone = model(tokens).detach()
    parallelize(model, grid, plan)
    laid = lay_out_batch(grid, plan, tokens)
    natural = Layout(grid, {"cp": Shard(1)})
    positions = distribute(torch.arange(11).expand(tokens.shape), natural)
    found = [
        laid.as_read(to_global(model(laid.tokens))),
        laid.as_read(to_global(model(laid.tokens, positions=laid.positions))),
        laid.as_read(to_global(model(laid.tokens, positions=None))),
        laid.as_read(to_global(model(laid.tokens.clone(), positions=laid.positions))),
        laid.as_read(to_global(model(documents=None, tokens=laid.tokens))),
        laid.as_read(to_global(model(laid.tokens.clone(), positions=laid.positions.values))),
        to_global(model(distribute(tokens, natural), positions=positions)),
    ]
    return [each.detach() - alone for each in found]


def test_a_model_without_the_argument_positions_takes_both_orders(pool: Any) -> None:
    for found in pool.run(without_the_argument, ranks=2):
        for difference in found:
            torch.testing.assert_close(difference, torch.zeros_like(difference), rtol=0, atol=1e-6)


def losses_of_a_batch() -> list[float]:
    found = []
    for microbatches in (1, 3):
        model, grid = make(), ProcessMesh.grid(cp=2)
        plan = replace(model.parallel_plan(), context="all_gather")
        parallelize(model, grid, plan)
        given = batch(11)
        laid = lay_out_batch(grid, plan, given["tokens"], given["targets"])
        assert laid.targets is not None, "they were given"
        loss = forward_backward(model, cross_entropy, laid.tokens, laid.targets, microbatches=microbatches)
        found.append(loss.item())
    return found


def test_the_rows_of_a_microbatch_carry_their_order(pool: Any) -> None:
    given = batch(11)
    expected = cross_entropy(make()(given["tokens"]), given["targets"]).item()
    for found in pool.run(losses_of_a_batch, ranks=2):
        assert found == pytest.approx([expected, expected], rel=1e-6)


def other_positions() -> str:
    model, grid = make(), ProcessMesh.grid(cp=2)
    plan = replace(model.parallel_plan(), context="all_gather")
    parallelize(model, grid, plan)
    tokens = batch(11)["tokens"]
    laid = lay_out_batch(grid, plan, tokens)
    positions = distribute(torch.arange(11).expand(tokens.shape), Layout(grid, {"cp": Shard(1)}))
    with pytest.raises(ValueError) as caught:
        model(laid.tokens, positions=positions)
    return str(caught.value)


def test_positions_that_do_not_say_the_order_of_the_tokens_are_refused(pool: Any) -> None:
    for error in pool.run(other_positions, ranks=2):
        assert "give the positions to lay_out_batch, and call Llama with positions=batch.positions" in error
