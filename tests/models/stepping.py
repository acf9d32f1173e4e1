"""A training step of a parallel model in a test, and what it communicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from weft.models.communication import Communication
from weft.models.train.observe import CollectiveCount
from weft.models.train.step import Found, find_gradients
from weft.reshard import GradientSync

from tests.support.collectives import Collectives


def observed_step(
    model: nn.Module, compute_loss: Callable[[], Tensor], sync: GradientSync | None = None, **options: Any
) -> tuple[Found, Communication]:
    """What `find_gradients` finds, and what it issues; that none is hidden is seen below all that could hide one."""
    issued: dict[Any, Any] = {}
    with Collectives() as seen, CollectiveCount() as count:
        found = find_gradients(
            model,
            compute_loss,
            GradientSync(model) if sync is None else sync,
            ended=lambda phase: issued.update({phase: count.take_each()}),
            **options,
        )
    communication = Communication.of(issued)
    assert Counter(seen.kinds) == communication.counts
    return found, communication
