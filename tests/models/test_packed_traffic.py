"""What ranks along "cp" exchange for packed rows: the keys that queries see and a rank lacks, predicted and issued."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy
from weft.kernels.attention import exchanged
from weft.mesh import ProcessMesh
from weft.models import forward_backward, lay_out_batch, parallelize, record
from weft.models.parallel.packed.transfer import KeysOnTheirWay
from weft.models.train.measure import CollectiveCount
from weft.reshard import GradientSync

from tests.models.test_packed_context import KEY, make, packed
from tests.support.collectives import Collectives
from tests.support.events import Events


def traffic(cp: int, family: str, length: int, rows: int, seed: int) -> Any:
    """The kinds and received bytes of a step's collectives, forward and backward, and this rank's bound of each."""
    grid, model = ProcessMesh.grid(cp=cp), make(family)
    plan = replace(model.parallel_plan(), context="all_gather")
    parallelize(model, grid, plan)
    given, _ = packed(length, rows, seed)
    laid = lay_out_batch(grid, plan, **given)
    with Collectives() as seen:
        logits = model(laid.tokens, KEY, positions=laid.positions, documents=laid.documents)
        forward = list(zip(seen.kinds, seen.nbytes, strict=True))
        logits.to_local().sum().backward()
    return forward, list(zip(seen.kinds, seen.nbytes, strict=True))[len(forward) :], held(laid.order, cp)


def held(order: Any, cp: int) -> list[Tensor]:
    """For each row, the rank of each token."""
    size = -(-sum(stop - start for start, stop in order.orders[0]) // cp)
    return [torch.cat([torch.arange(*run) for run in runs]).argsort() // size for runs in order.orders]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "qwen"])
@pytest.mark.parametrize("cp", [2, 4])
def test_a_layer_receives_the_keys_that_its_queries_see_and_it_does_not_hold(cp: int, family: str, pool: Any) -> None:
    length, rows, width = 64, 2, 2 * 4 * (32 // 8) * 4  # keys and values, heads, their size, bytes
    (given, _), token = packed(length, rows, 1), torch.arange(length)
    documents = given["documents"]
    for rank, (forward, backward, owners) in enumerate(pool.run(traffic, cp, family, length, rows, 1, ranks=cp)):
        for layer in range(2):
            window = 5 if family == "qwen" and layer == 0 else length
            received = returned = 0
            for row, owner in enumerate(owners):
                sees = (documents[row][:, None] == documents[row]) & (token <= token[:, None])
                sees &= token > token[:, None] - window
                received += int((sees[owner == rank].any(0) & (owner != rank)).sum())
                for other in set(range(cp)) - {rank}:
                    returned += int((sees[owner == other].any(0) & (owner == rank)).sum())
            assert forward[layer] == ("all-to-all", received * width)
            assert backward[1 - layer] == ("all-to-all", returned * width)
        assert len(forward) == len(backward) == 2


def nothing_to_exchange() -> list[str]:
    grid, model = ProcessMesh.grid(cp=2), make()
    plan = replace(model.parallel_plan(), context="all_gather")
    parallelize(model, grid, plan)
    tokens, documents = torch.zeros(1, 16, dtype=torch.int64), torch.arange(4).repeat_interleave(4).unsqueeze(0)
    laid = lay_out_batch(grid, plan, tokens, documents=documents)
    with Collectives() as seen:
        model(laid.tokens, positions=laid.positions, documents=laid.documents).to_local().sum().backward()
    return seen.kinds


def test_documents_that_are_whole_on_their_ranks_need_no_exchange(pool: Any) -> None:
    assert pool.run(nothing_to_exchange, ranks=2) == [[], []]


def predicted_and_issued() -> tuple[str, str]:
    grid, model = ProcessMesh.grid(dp=2, cp=2), make()
    plan = replace(model.parallel_plan(), context="all_gather")
    given, _ = packed(64, 4)
    rank = torch.distributed.get_rank()
    inputs = {"documents": given["documents"]}
    predicted = record(model, grid, plan, batch=(4, 64), rank=rank, inputs=inputs, microbatches=2)
    parallelize(model, grid, plan)
    sync = GradientSync(model)
    with CollectiveCount() as count:
        forward_backward(model, partial(cross_entropy, denominator=256.0), **given, microbatches=2, sync=sync)
    exchanges = [each for each in count.take_each() if each.kind == "all-to-all"]
    issued = sum(each.nbytes for each in exchanges), len(exchanges), {each.axes for each in exchanges}
    of_keys = predicted.select(kind="all-to-all")
    return str((of_keys.nbytes, of_keys.count, {each.axes for each in of_keys.entries})), str(issued)


@pytest.mark.exhaustive
def test_the_exchange_is_predicted_as_it_is_issued(pool: Any) -> None:
    for predicted, issued in pool.run(predicted_and_issued, ranks=4):
        assert predicted == issued
        assert "('cp',)" in issued


def events_of_a_step(family: str, recompute: str) -> tuple[list[str], list[str]]:
    """This rank's exchanges, waits, and attention to own and to received keys, in order: of forward and of backward."""
    grid, model = ProcessMesh.grid(cp=2), make(family)
    plan = replace(model.parallel_plan(), context="all_gather", recompute=recompute)
    parallelize(model, grid, plan)
    given, _ = packed(64, 2, 1)
    if family == "gpt":  # a single document in each row: all keys of the row travel
        given |= {"documents": torch.zeros(2, 64, dtype=torch.int64), "positions": torch.arange(64).expand(2, 64)}
    laid = lay_out_batch(grid, plan, **given)
    attend, attend_backward = exchanged._attend, exchanged._attend_backward
    own_of: Any = KeysOnTheirWay.own.fget
    own: list[object] = []

    def own_keys(keys: KeysOnTheirWay) -> Any:
        own.append(own_of(keys))
        return own[-1]

    with Events() as seen:

        def forward_part(*args: Any) -> Any:
            seen.events.append("own keys" if args[3] in own else "received keys")
            return attend(*args)

        def backward_part(*args: Any) -> Any:
            seen.events.append("own keys" if args[6] in own else "received keys")
            return attend_backward(*args)

        parts = patch.multiple(exchanged, _attend=forward_part, _attend_backward=backward_part)
        with parts, patch.object(KeysOnTheirWay, "own", property(own_keys)):
            logits = model(laid.tokens, KEY, positions=laid.positions, documents=laid.documents)
            forward = len(seen.events)
            logits.to_local().sum().backward()
        return seen.events[:forward], seen.events[forward:]


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        ("llama", "none"),
        ("qwen", "none"),
        pytest.param("gpt", "none", id="one-document"),
        pytest.param("llama", "full", marks=pytest.mark.exhaustive),
        pytest.param("llama", "selective", marks=pytest.mark.exhaustive),
    ],
)
def test_attention_to_own_keys_runs_while_received_ones_are_on_their_way(
    family: str, recompute: str, pool: Any
) -> None:
    """Forward: own keys before the wait for received ones. Backward: received keys first, whose gradients then travel.

    A recomputed block exchanges its keys anew, in the order of forward; under "selective" it keeps received keys.
    """
    layer = ["all-to-all", "own keys", "waited", "received keys"]
    again = {"none": [], "selective": ["own keys", "received keys"], "full": layer}[recompute]
    for forward, backward in pool.run(events_of_a_step, family, recompute, ranks=2):
        assert forward == 2 * layer
        assert backward == 2 * [*again, "received keys", "all-to-all", "own keys", "waited"]
