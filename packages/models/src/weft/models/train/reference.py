"""The reference of dpo and kto, whose log-probabilities are compared with the policy's.

`ModelReference`: a frozen model on its own mesh over the run's processes. `AdapterReference`: the policy without
adapters. `PrecomputedReference` of precomputed.py: a table of numbers, computed once before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from weft.reshard import drop_gathered

from ..data.batches import Rows
from ..data.examples.rows import ExampleBatches
from ..parallel import parallelize
from ..parallel.lora import without_adapters
from ..step.preference import log_probabilities
from .config import TrainConfig
from .explanation import Outline
from .feed import Feed, Share
from .initial_weights import draw_weights, load_weights
from .run import Run


class Reference(Protocol):
    """Gives log-probabilities under the reference. Every rank calls the methods in the same order."""

    def read(self, step: int, which: int, own: Sequence[Share]) -> Any:
        """The data of a step for `of_step`; called in a thread, a step ahead.

        which: 0; for kto also 1, the same rows with the mismatched completions.
        own: this rank's rows as the model in training has read them.
        """
        ...

    def of_step(self, step: int, which: int, found: Any) -> Tensor:
        """Log-probabilities of the documents in all rows of a step, on every rank: [rows, `documents_per_row`].

        A document is an example's segment: for dpo an answer, chosen or rejected, for kto a completion.
        found: from `read`, with the same step and `which`.
        """
        ...

    def of_held_out(self, first: int, count: int, which: int) -> Tensor:
        """Log-probabilities [count, documents] of held-out rows, from row `first` on, on every rank."""
        ...


class Scorer:
    """Computes log-probabilities of the documents in rows, under a model without dropout, in any layout.

    The model is a reference, or the model in training. A Scorer reads the rows, too.
    outline: with the model's mesh and plan. Communication of each method but `read_step`: as `log_probabilities`.
    """

    def __init__(self, batches: ExampleBatches, outline: Outline, model: nn.Module, device: torch.device) -> None:
        self._batches, self._outline, self._model, self._device = batches, outline, model, device
        self.feed = Feed(outline, model, device)

    def read_step(self, step: int, which: int) -> list[Share]:
        """This rank's rows of a step, on the host. which: as for `ExampleBatches.batch`."""
        return self.feed.read_step(partial(self._batches.batch, step, which=which))

    def of_step(self, step: int, which: int, found: Sequence[Share]) -> Tensor:
        """As `Reference.of_step`."""
        return self.score(found, self._outline.batch_shape[0])

    def of_held_out(self, first: int, count: int, which: int) -> Tensor:
        """As `Reference.of_held_out`."""
        return self._of_rows(partial(self._batches.held_out, which=which), first, count)

    def of_every(self, first: int, count: int, which: int) -> Tensor:
        """Log-probabilities [count, documents] of rows of `ExampleBatches.every`, from row `first` on."""
        return self._of_rows(partial(self._batches.every, which=which), first, count)

    def _of_rows(self, rows_of: Callable[[slice], Rows], first: int, count: int) -> Tensor:
        return self.score(self.feed.read(rows_of, first, count, self._outline.microbatch_rows), count)

    def score(self, shares: Sequence[Share], rows: int) -> Tensor:
        """Log-probabilities [rows, documents] of a batch, on every rank. shares: this rank's of the `rows` rows."""
        was_training = self._model.training
        self._model.eval()
        with torch.compiler.set_stance("force_eager"):
            found = log_probabilities(
                self._model,
                [self.feed.lay_out(share, preferences=True) for share in shares],
                documents_per_row(self._batches, self._outline.config),
                rows,
                partial(self._outline.autocast_context, self._device.type),
            )
        drop_gathered(self._model)
        self._model.train(was_training)
        return found


def documents_per_row(batches: ExampleBatches, config: TrainConfig) -> int:
    """The most documents with examples in a row: two for each pair of dpo."""
    return batches.examples_per_row * (2 if config.task == "dpo" else 1)


class ModelReference(Scorer):
    """A frozen model, on its own mesh over the processes of the run."""

    def __init__(self, run: Run, batches: ExampleBatches, device: torch.device) -> None:
        """Makes the model, and loads the weights or draws them from the seed.

        Communication: as `load_weights`. Raises ValueError for weights of a different model.
        """
        outline = Outline.of_reference(run.config, run.axes, device.type)
        model = parallelize(outline.make_model().requires_grad_(False), outline.mesh, outline.plan)
        if run.reference is None:
            model = draw_weights(model, device, run.config.seed)
        else:
            model = load_weights(model, run.reference, device, outline.mesh, outline.plan)
        super().__init__(batches, outline, model.eval(), device)

    def read(self, step: int, which: int, own: Sequence[Share]) -> list[Share]:
        """As `Reference.read`: this rank's rows on the mesh of the reference."""
        return self.read_step(step, which)


class AdapterReference(Scorer):
    """The model in training, called without adapters: a reference that needs no further memory."""

    def read(self, step: int, which: int, own: Sequence[Share]) -> Sequence[Share]:
        """As `Reference.read`: the rows that the model in training has read."""
        return own

    def score(self, shares: Sequence[Share], rows: int) -> Tensor:
        with without_adapters(self._model):
            return super().score(shares, rows)
