"""A training step of a parallel model in a test, with its communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from weft.models.parallel.pipeline.step import Microbatch
from weft.models.step.communication import Communication
from weft.models.step.find_gradients import StepResult, find_gradients
from weft.models.train.measure import CollectiveCount
from weft.reshard import GradientSync

from tests.support.collectives import Collectives


def observed_step(
    model: nn.Module,
    criterion: Callable[..., Tensor],
    tokens: Tensor,
    targets: Tensor,
    sync: GradientSync | None = None,
    inputs: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[StepResult, Communication]:
    """`observed_microbatches` of one."""
    microbatch = Microbatch(args=(tokens,), kwargs=inputs or {}, targets=targets)
    return observed_microbatches(model, criterion, [microbatch], sync, **options)


def observed_microbatches(
    model: nn.Module,
    criterion: Callable[..., Tensor],
    microbatches: list[Microbatch],
    sync: GradientSync | None = None,
    **options: Any,
) -> tuple[StepResult, Communication]:
    """The results of `find_gradients`, and its communication; also checks, below all layers, that none is hidden."""
    issued: dict[Any, Any] = {}
    with Collectives() as seen, CollectiveCount() as count:
        found = find_gradients(
            model,
            criterion,
            microbatches,
            GradientSync(model) if sync is None else sync,
            after_phase=lambda phase: issued.setdefault(phase, []).extend(count.take_each()),
            **options,
        )
    communication = Communication.of(issued)
    assert Counter(seen.kinds) == communication.counts, f"{seen.kinds}\nissued by phase:\n{communication}"
    return found, communication
