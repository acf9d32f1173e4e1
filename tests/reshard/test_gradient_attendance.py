"""Messages between ranks about which gradients they have: when they are read; and gradients kept from earlier steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.mesh import Layout
from weft.reshard import GradientSync, distribute, to_global
from weft.reshard.moving.dtensor import wrap
from weft.reshard.world import world
from weft.reshard.world.world import publish

from tests.reshard.test_gradient_divergence import ALL, DATA, SIZES, Weights, assert_right, backward, right, whole_of
from tests.reshard.test_gradients import Scale


def told_in_a_step() -> tuple[int, int]:
    """The numbers of messages that a rank with all gradients writes and reads in a step after the first."""
    model = Weights(DATA)
    sync = GradientSync(model)
    said, asked = [], []
    backward(model, DATA, ALL, 0)
    sync.wait()

    def noted(what: str, value: bytes) -> None:
        said.append(what)
        publish(what, value)

    world.publish, world.published, before = noted, lambda names: asked.append(names), (world.publish, world.published)
    try:
        backward(model, DATA, ALL, 100)
        sync.wait()
    finally:
        world.publish, world.published = before
    return len(said), len(asked)


def test_a_rank_with_all_gradients_sends_one_message_and_reads_none(pool: Any) -> None:
    assert pool.run(told_in_a_step, ranks=2) == [(1, 0)] * 2


def kept_from_before() -> None:
    """Earlier gradients are kept where no rank, or only the other rank, has a new one, and after autograd.grad."""
    model = Weights(DATA)
    sync = GradientSync(model)
    truth: list[Tensor | None] = [None] * len(SIZES)
    for number, used in enumerate([(ALL, ALL), ([0, 1], [1]), ([], []), ([2], [0]), ([], ALL)]):
        backward(model, DATA, used[dist.get_rank()], 100 * number)
        sync.wait()
        x = distribute(whole_of(7, SIZES[3]), Layout(DATA, "dp: S(0)"))
        torch.autograd.grad(Scale.apply(x, model.all[3]), model.all[3], grad_outputs=x)
        sync.wait()
        for i in range(len(SIZES)):
            more = right(i, used, 100 * number)
            truth[i] = more if truth[i] is None else truth[i] if more is None else truth[i] + more
        assert_right(model, truth, number)


def test_gradients_of_earlier_steps_are_kept(pool: Any) -> None:
    pool.run(kept_from_before, ranks=2)


def read_in_a_step(layout: str) -> int:
    """How often a rank reads messages when its gradients have their final layout from the start."""
    model = Weights(DATA)
    sync = GradientSync(model)
    asked: list[Sequence[str]] = []
    before, world.published = world.published, lambda names: asked.append(names) or before(names)
    try:
        for _ in range(3):
            for parameter in model.all:
                parameter.backward(
                    wrap(torch.ones(len(parameter), dtype=torch.float64), Layout(DATA, layout), parameter.shape)
                )
            sync.wait()
    finally:
        world.published = before
    for parameter in model.all:
        assert torch.equal(to_global(parameter.grad), torch.full((len(parameter),), 6.0 if layout else 3.0).double())
    return len(asked)


@pytest.mark.parametrize("layout", ["", "dp: P"])
def test_gradients_that_are_there_are_no_news(layout: str, pool: Any) -> None:
    assert pool.run(read_in_a_step, layout, ranks=2) == [0, 0]
