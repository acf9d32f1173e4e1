"""What a run learns: the data and the loss of each step, for the tasks pretrain and sft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from weft.kernels import cross_entropy

from ..data.batches import Batches
from ..data.examples.rows import ExampleBatches
from ..data.examples.source import ExampleMixture, Examples
from ..exact import fitting_part
from ..parallel.pipeline.step import Microbatch
from ..step.criterion import Criterion
from .explanation import Outline
from .feed import AnyBatches, Feed, Share
from .run import Run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """The arguments of `find_gradients` for a step, or of `find_loss` for held-out rows."""

    criterion: Criterion
    microbatches: Sequence[Microbatch]
    weight: float = 1.0  # factor of the batch's loss in the mean loss of all held-out rows


def open_batches(run: Run) -> AnyBatches:
    """The reader of the run's data by rows: of texts, or of a task's examples."""
    data = run.config.data
    options: dict[str, Any] = {
        "sequence_length": data.sequence_length,
        "batch_size": data.batch_size,
        "seed": run.config.seed,
    }
    if isinstance(run.corpus, Examples | ExampleMixture):
        return ExampleBatches(run.corpus, **options, packed=data.pack)
    return Batches(run.corpus, **options, packed=data.pack and run.corpus.is_prepared)


class TokenObjective:
    """Cross-entropy of the next token: of every token of texts (pretrain), or of the answers' tokens (sft).

    The loss is the mean over the learned tokens of the global batch, whatever its microbatches, packing and mesh.
    `PreferenceObjective` has the same methods, which `Trainer` calls: in a step `read`, then `step`.
    """

    def __init__(self, batches: AnyBatches, outline: Outline, model: nn.Module, device: torch.device) -> None:
        self._batches, self._outline = batches, outline
        self._feed = Feed(outline, model, device)

    def begin(self, step: int, print_line: Callable[[str], None]) -> None:
        """Called once, before the run's first step. These tasks have nothing to prepare."""

    def read(self, step: int) -> list[Share]:
        """This rank's rows of a step, on the host. Called in a thread, a step ahead."""
        return self._feed.read_step(partial(self._batches.batch, step))

    def step(self, step: int, shares: Sequence[Share]) -> StepBatch:
        """The criterion and the microbatches of a step. shares: from `read`. Communication: none."""
        return StepBatch(criterion=self._criterion(step), microbatches=self._feed.training(step, shares))

    def held_out(self) -> Iterator[StepBatch]:
        """The held-out rows, in batches of a step's size. The batches' losses, each times `weight`, add up to the mean.

        Communication: none.
        """
        (size, T), count = self._outline.batch_shape, self._batches.num_held_out
        learned = count * T
        if isinstance(self._batches, ExampleBatches):
            learned = self._batches.held_out_counts(slice(None)).learned
        criterion = partial(cross_entropy, denominator=float(learned))
        for first in range(0, count, size):
            rows = min(size, count - first)
            exact = self._outline.plan.exact
            part = rows if exact is None else fitting_part(exact, rows)
            shares = self._feed.read(self._batches.held_out, first, rows, part)
            yield StepBatch(criterion=criterion, microbatches=[self._feed.lay_out(share) for share in shares])

    def keep_reference(self, step: int) -> None:
        """Does nothing: these tasks have no reference."""

    def whole(self, step: int, model: nn.Module) -> StepBatch:
        """The criterion and all rows of a step, for this process alone, to compute the loss of a single process.

        model: not parallelized.
        """
        rows = self._batches.batch(step, slice(None))
        return StepBatch(criterion=self._criterion(step), microbatches=self._feed.whole_batch(step, rows, model))

    def _criterion(self, step: int) -> Criterion:
        rows, T = self._outline.batch_shape
        learned = rows * T
        if isinstance(self._batches, ExampleBatches):
            learned = self._batches.counts(step, slice(None)).learned
        return self._outline.token_criterion(float(learned))
