"""What a run learns: the rows, the criterion and the reference of each step, for every task.

`TokenObjective`: pretrain and sft. `PreferenceObjective`: dpo and kto, preferences of examples, compared with a
reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy

from ..data.batches import Batches
from ..data.examples.rows import Counts, ExampleBatches
from ..data.examples.source import ExampleMixture, Examples
from ..exact import fitting_part
from ..parallel.pipeline.step import Microbatch
from ..preference_losses import kl_of
from ..step.criterion import Criterion
from ..step.preference import DPOCriterion, KTOCriterion
from .explanation import Outline
from .feed import AnyBatches, Feed, Share
from .reference import (
    AdapterReference,
    ModelReference,
    PrecomputedReference,
    PrintLine,
    Reference,
    Scorer,
    documents_per_row,
)
from .run import Run
from .task_config import reference_of


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StepRows:
    """The data of a step, read in a thread. For the sets of rows, see `PreferenceObjective._sets`."""

    own: Sequence[Sequence[Share]]  # by set: this rank's rows for the model in training
    reference: Sequence[Any]  # by set: from `Reference.read`


class PreferenceObjective:
    """The losses of dpo and kto; see `TokenObjective` for the methods.

    Losses, kto's divergence and the metrics are means over the examples of the global batch.
    """

    def __init__(
        self, batches: ExampleBatches, outline: Outline, model: nn.Module, device: torch.device, reference: Reference
    ) -> None:
        self._batches, self._outline, self._reference = batches, outline, reference
        self._scorer = Scorer(batches, outline, model, device)
        self._feed = self._scorer.feed
        self._is_kto = outline.config.task == "kto"
        self._reference_values: list[Tensor] = []
        self._mismatched_values: Tensor | None = None

    def begin(self, step: int, print_line: PrintLine) -> None:
        """Fill the table of a precomputed reference. step: the run's first, from 0. print_line: prints on rank 0.

        Communication and errors: as `PrecomputedReference.prepare`.
        """
        if isinstance(self._reference, PrecomputedReference):
            self._reference.prepare(step, self._scorer, print_line)

    def read(self, step: int) -> _StepRows:
        """As `TokenObjective.read`."""
        own = [self._scorer.read_step(step, which) for which in self._sets]
        return _StepRows(
            own=own, reference=[self._reference.read(step, which, shares) for which, shares in enumerate(own)]
        )

    def step(self, step: int, read: _StepRows) -> StepBatch:
        """As `TokenObjective.step`. Communication: the reference's; for kto also a forward of the mismatched rows."""
        reference, mismatched = self._find_values(step, read)
        counts = self._batches.counts(step, slice(None))
        return StepBatch(
            criterion=self._outline.with_routers(self._criterion(counts, _kl(counts, reference, mismatched))),
            microbatches=_with_reference(self._feed.training(step, read.own[0], preferences=True), reference[0]),
        )

    def _find_values(self, step: int, read: _StepRows) -> tuple[list[Tensor], Tensor | None]:
        """The reference's log-probabilities of each set of rows, and for kto the model's of the mismatched rows."""
        reference = [self._reference.of_step(step, which, found) for which, found in enumerate(read.reference)]
        return reference, self._scorer.of_step(step, 1, read.own[1]) if self._is_kto else None

    def held_out(self) -> Iterator[StepBatch]:
        """As `TokenObjective.held_out`. Communication: the reference's.

        The divergence of kto is of all held-out examples, so that the loss depends neither on the size of a batch nor
        on the packing.
        """
        of_all = self._batches.held_out_counts(slice(None))
        kl = self._held_out_kl(of_all) if self._is_kto else None
        for first, rows in self._held_out_batches():
            reference = self._reference.of_held_out(first, rows, 0)
            counts = self._batches.held_out_counts(slice(first, first + rows))
            shares = self._feed.read(self._batches.held_out, first, rows, rows)
            laid_out = [self._feed.lay_out(share, preferences=True) for share in shares]
            yield StepBatch(
                criterion=self._criterion(counts, kl),
                microbatches=_with_reference(laid_out, reference),
                weight=counts.examples / of_all.examples,
            )

    def _held_out_batches(self) -> Iterator[tuple[int, int]]:
        """The first row and the number of rows of each batch of held-out rows, of a step's size."""
        size, total = self._outline.batch_shape[0], self._batches.num_held_out
        return ((first, min(size, total - first)) for first in range(0, total, size))

    def _held_out_kl(self, counts: Counts) -> Tensor:
        """The divergence of kto over all held-out rows. counts: of these rows. Communication: the reference's."""
        policy, reference = (
            torch.cat([scores.of_held_out(*rows, 1) for rows in self._held_out_batches()])
            for scores in (self._scorer, self._reference)
        )
        return kl_of(policy, reference, denominator=float(counts.examples))

    def keep_reference(self, step: int) -> None:
        """Keep the reference's numbers of a step for `whole`. Every rank calls this. Communication: as `step`."""
        self._reference_values, self._mismatched_values = self._find_values(step, self.read(step))

    def whole(self, step: int, model: nn.Module) -> StepBatch:
        """As `TokenObjective.whole`, with the reference's numbers of `keep_reference`."""
        rows, counts = self._batches.batch(step, slice(None)), self._batches.counts(step, slice(None))
        kl = _kl(counts, self._reference_values, self._mismatched_values)
        return StepBatch(
            criterion=self._outline.with_routers(self._criterion(counts, kl)),
            microbatches=_with_reference(
                self._feed.whole_batch(step, rows, model, preferences=True), self._reference_values[0]
            ),
        )

    @property
    def _sets(self) -> range:
        """The values of `which` in a step, as for `ExampleBatches.batch`: 0; for kto also 1, the mismatched rows."""
        return range(2 if self._is_kto else 1)

    def _criterion(self, counts: Counts, kl: Tensor | None) -> Criterion:
        """The criterion of a batch. counts: of the batch's rows. kl: the divergence of kto; None for dpo."""
        documents, config = documents_per_row(self._batches, self._outline.config), self._outline.config
        if kl is None:
            return DPOCriterion(
                num_documents=documents,
                denominator=float(counts.examples),
                beta=config.dpo.beta,
                label_smoothing=config.dpo.label_smoothing,
                loss=config.dpo.loss,
                length_normalized=config.dpo.length_normalized,
            )
        return KTOCriterion(
            num_documents=documents,
            num_desirable=counts.desirable,
            num_undesirable=counts.examples - counts.desirable,
            kl=kl,
            beta=config.kto.beta,
            desirable_weight=config.kto.desirable_weight,
            undesirable_weight=config.kto.undesirable_weight,
        )


def _kl(counts: Counts, reference: Sequence[Tensor], mismatched: Tensor | None) -> Tensor | None:
    """The divergence of kto over a step's rows; None for dpo, without mismatched rows. counts: of these rows.

    reference: by set, log-probabilities. mismatched: the policy's, of the mismatched rows.
    """
    return None if mismatched is None else kl_of(mismatched, reference[1], denominator=float(counts.examples))


def _with_reference(microbatches: Sequence[Microbatch], reference: Tensor) -> list[Microbatch]:
    """The microbatches, with the reference's log-probabilities [rows, D] of a batch in their targets."""
    return [replace(each, targets=each.targets.with_reference(reference)) for each in microbatches]


def make_preference_objective(
    run: Run, batches: ExampleBatches, outline: Outline, model: nn.Module, device: torch.device
) -> PreferenceObjective:
    """The objective of a run of dpo or kto, with the reference of the config.

    model: in training, with initial weights. Communication and errors: as `ModelReference`, with a reference model.
    """
    reference: Reference
    kind = reference_of(run.config)
    if kind == "adapters":
        reference = AdapterReference(batches, outline, model, device)
    elif kind == "model":
        reference = ModelReference(run, batches, device)
    else:
        reference = PrecomputedReference(run, batches, device)
    return PreferenceObjective(batches, outline, model, device, reference)
