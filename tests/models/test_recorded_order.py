"""Digests of tokens over context ranks: the recorder finds the tokens' order wherever the model finds the order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import lay_out_batch, parallelize
from weft.models.compare.record_file import Key, StepDigests
from weft.models.compare.recorder import Recorder
from weft.models.parallel.batch import Batch
from weft.models.parallel.pipeline.step import Microbatch
from weft.models.step.find_gradients import find_gradients
from weft.reshard import GradientSync

from tests.models.test_context import batch, make

ROWS, LENGTH = 3, 24


def copied(tokens: Tensor) -> Tensor:
    """Tokens without an order, as a program has that changes tokens after `lay_out_batch`."""
    return tokens + 0


# How a program calls the model with the batch that `lay_out_batch` made: the arguments, and the keywords.
CALLS: dict[str, Callable[[Batch], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "tokens": lambda laid: ((laid.tokens,), {}),
    "positions": lambda laid: ((copied(laid.tokens),), {"positions": laid.positions}),
    "values": lambda laid: ((copied(laid.tokens),), {"positions": getattr(laid.positions, "values", laid.positions)}),
    "tokens-and-values": lambda laid: (
        (laid.tokens,),
        {"positions": getattr(laid.positions, "values", laid.positions)},
    ),
    "keyword": lambda laid: ((), {"tokens": copied(laid.tokens), "positions": laid.positions}),
}


def mean_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits, targets, denominator=float(ROWS * LENGTH))


def mean_of_losses(losses: Tensor, targets: Tensor) -> Tensor:
    """For a model that gets the targets, and computes the losses itself."""
    return losses.sum() / (ROWS * LENGTH)


def digested(
    cp: int, call: str, *, packed: bool = False, losses: bool = False, stride: int = 0, apart: bool = False
) -> StepDigests | None:
    """The digests of a step. losses: computed by the model. stride: of positions that are given; 0: none are given.

    apart: the targets are laid out by another call, without the documents.
    """
    grid, model = ProcessMesh.grid(cp=cp), make()
    plan = replace(model.parallel_plan(), context="all_gather")
    parallelize(model, grid, plan)
    given = batch(LENGTH, packed=packed, rows=ROWS)
    if stride:
        given["positions"] = (stride * torch.arange(LENGTH)).expand(ROWS, LENGTH).contiguous()
    laid = lay_out_batch(grid, plan, **given)
    args, kwargs = CALLS[call](laid)
    if packed:
        kwargs["documents"] = laid.documents
    if losses:
        kwargs["targets"] = laid.targets
    targets = lay_out_batch(grid, plan, given["tokens"], given["targets"]).targets if apart else laid.targets
    recorder = Recorder(model, (ROWS, LENGTH))
    assert recorder.begin(1)
    microbatches = [Microbatch(args=args, kwargs=kwargs, targets=targets)]
    with recorder.watching(microbatches):
        criterion = mean_of_losses if losses else mean_of_logits
        sync = GradientSync(model)
        found = find_gradients(model, criterion, microbatches, sync, after_sync=recorder.add_gradients)
    recorder.finish(found.loss, None)
    return next(iter(recorder.take()), None)


def on_ranks(pool: Any, cp: int, call: str, **options: Any) -> StepDigests:
    found: StepDigests = pool.run(partial(digested, **options), cp, call, ranks=cp)[0]
    return found


def different(found: StepDigests, expected: StepDigests) -> list[Key]:
    """The tensors whose digests differ by more than rounding; embeddings, which are not rounded, by a bit."""
    a, b = found.by_key(), expected.by_key()
    both = [key for key in a if key in b]  # without ranks a fused op computes some modules
    assert len(both) > 60
    return [
        key
        for key in both
        if abs(a[key].sketches - b[key].sketches).max() > 1e-4 * b[key].squares ** 0.5
        or ((key.kind, key.name) == ("output", "embed_tokens") and (a[key].hashes != b[key].hashes).any())
    ]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("call", CALLS)
def test_the_order_of_a_call_is_found_where_the_model_finds_it(call: str, packed: bool, pool: Any) -> None:
    alone = on_ranks(pool, 1, "positions", packed=packed)
    assert different(on_ranks(pool, 2, call, packed=packed), alone) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", ["positions", "values"])
def test_positions_that_a_program_gives_are_kept(call: str, pool: Any) -> None:
    """Positions in steps of two are not found from the order alone."""
    assert different(on_ranks(pool, 2, call, stride=2), on_ranks(pool, 1, "positions", stride=2)) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_losses_of_a_model_are_in_the_order_of_the_positions(packed: bool, pool: Any) -> None:
    """Outputs [B, T], whose last dim are the tokens."""
    alone = on_ranks(pool, 1, "positions", losses=True, packed=packed)
    assert different(on_ranks(pool, 2, "positions", losses=True, packed=packed), alone) == []


@pytest.mark.exhaustive
def test_labels_in_another_order_are_found_at_the_loss(pool: Any) -> None:
    """The outputs are those of one process, and the first gradient is not."""
    alone = on_ranks(pool, 1, "positions", packed=True)
    (first, *further) = different(on_ranks(pool, 2, "positions", packed=True, apart=True), alone)
    assert (first.kind, first.name) in (("backward", ""), ("backward", "lm_head"))
    assert all(key.kind != "output" for key in further)
