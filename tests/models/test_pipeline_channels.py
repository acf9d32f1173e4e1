"""Messages between stages on real processes: the groups they use, and which messages wait for which."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import PipelinePlan, forward_backward, parallelize
from weft.models.parallel.pipeline.messages import Channel

from tests.models.test_pipeline import MICROBATCHES, batch, make


def traffic(ranks: int, schedule: str) -> list[tuple[list[int], set[tuple[str, int]]]]:
    """For each group that carries messages of a step: its ranks, and this rank's directions and peers in the group."""
    model, ways = make("llama"), defaultdict[Any, set[tuple[str, int]]](set)
    plan = replace(model.parallel_plan(), pipeline=PipelinePlan(microbatches=MICROBATCHES, schedule=schedule))  # type: ignore[operator]
    parallelize(model, ProcessMesh.grid(pp=ranks), plan)
    send, receive = dist.isend, dist.irecv

    def sent(part: Tensor, *, group: dist.ProcessGroup, group_dst: int) -> Any:
        ways[group].add(("to", dist.get_global_rank(group, group_dst)))
        return send(part, group=group, group_dst=group_dst)

    def received(part: Tensor, *, group: dist.ProcessGroup, group_src: int) -> Any:
        ways[group].add(("from", dist.get_global_rank(group, group_src)))
        return receive(part, group=group, group_src=group_src)

    with patch.object(dist, "isend", sent), patch.object(dist, "irecv", received):
        forward_backward(model, cross_entropy, *batch())
    return [(dist.get_process_group_ranks(group), used) for group, used in ways.items()]


@pytest.mark.parametrize(
    ("ranks", "schedule", "groups"),
    [
        pytest.param(3, "1f1b", [2, 4, 2], id="1f1b"),
        pytest.param(3, "zero_bubble", [2, 4, 2], id="zero-bubble", marks=pytest.mark.exhaustive),
        pytest.param(2, "interleaved", [6, 6], id="interleaved"),  # four stages have three boundaries
    ],
)
def test_anchor_30_each_direction_between_two_stages_has_a_group_of_its_own(
    ranks: int, schedule: str, groups: list[int], pool: Any
) -> None:
    found = pool.run(traffic, ranks, schedule, ranks=ranks)
    assert [len(of_rank) for of_rank in found] == groups
    for rank, of_rank in enumerate(found):
        for members, ways in of_rank:
            ((_, other),) = ways  # a single direction, to or from a single rank
            assert members == sorted((rank, other))


def _send(channel: Channel, message: Tensor) -> None:
    channel.check(message, "alike")
    channel.send(message, "alike")


def received_early() -> list[float]:
    """The second message is received early: it is sent only after an answer and an all-reduce."""
    here, cpu = dist.get_rank(), torch.device("cpu")
    mesh = ProcessMesh([here], ["dp"])
    forward, backward = (Channel(f"of a test, {way}", (0, 1), here, mesh, cpu, {}) for way in ("F", "B"))
    total = torch.ones(())
    if here == 0:
        _send(forward, torch.tensor([1.0, 2.0]))
        answer = backward.receive("alike", more=False)
        dist.all_reduce(total)
        _send(forward, answer + total)
        forward.finish()
        return answer.tolist()
    with patch.object(dist, "irecv", side_effect=dist.irecv) as asked:
        first = forward.receive("alike", more=True)
        assert asked.call_count == 2
    _send(backward, 10 * first)
    backward.finish()
    dist.all_reduce(total)
    return forward.receive("alike", more=False).tolist()


def test_anchor_30_a_message_that_is_received_early_holds_up_nothing(pool: Any) -> None:
    """An early receive blocks neither the other direction, nor a collective, nor its own rank."""
    assert pool.run(received_early, ranks=2) == [[10.0, 20.0], [12.0, 22.0]]
