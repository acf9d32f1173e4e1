"""A rank's rows of a batch, read from the data and laid out as microbatches for one model on one mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from weft.mesh import Layout, Shard
from weft.reshard.extension import this_rank

from ..data.batches import Batches, Rows
from ..data.examples.rows import ExampleBatches, TaskRows
from ..parallel import lay_out_batch
from ..parallel.batch import prepare_rows
from ..parallel.parallelize import pipeline_of
from ..parallel.pipeline.step import Microbatch
from ..step.forward_backward import divide_batch, link_positions
from ..step.preference import PreferenceTargets
from .explanation import Outline

AnyBatches = Batches | ExampleBatches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """This rank's rows of a microbatch, on the host. Made by `Feed.read`."""

    rows: Rows
    first: int  # the number of the first of these rows in the batch
    count: int  # the rows of the whole microbatch, over all ranks


class Feed:
    """Reads this rank's rows of a batch, and lays them out for `model`.

    Made for the model in training, and for a reference model, whose mesh may differ.
    outline: of the run, with the model's mesh and plan. device: where rows are laid out.
    """

    def __init__(self, outline: Outline, model: nn.Module, device: torch.device) -> None:
        pipeline = pipeline_of(model)
        self._mesh, self._plan = outline.mesh if pipeline is None else pipeline.stage_mesh, outline.plan
        self._outline, self._model, self._device = outline, model, device
        self._layout = Layout(self._mesh, {"dp": Shard(0)})

    def read_step(self, rows_of: Callable[[slice], Rows]) -> list[Share]:
        """This rank's rows of each microbatch of a step. rows_of: reads some rows of the step. Called in a thread."""
        return self.read(rows_of, 0, self._outline.batch_shape[0], self._outline.microbatch_rows)

    def read(self, rows_of: Callable[[slice], Rows], start: int, count: int, size: int) -> list[Share]:
        """This rank's rows of each microbatch of a batch: the `count` rows from row `start` on.

        Packed rows are prepared for the model's attention, too.
        rows_of: reads some rows, counted from row 0. size: the rows of a microbatch, over all ranks.
        """
        shares, dtype = [], getattr(torch, self._outline.config.dtype)
        for first in range(0, count, size):
            length = min(size, count - first)
            own = self._layout.local_slices((length, self._outline.batch_shape[1]), this_rank())[0]
            rows = rows_of(slice(start + first + own.start, start + first + own.stop))
            prepare_rows(self._model, self._mesh, self._plan, rows.documents, self._device, dtype=dtype)
            shares.append(Share(rows=rows, first=first + own.start, count=length))
        return shares

    def training(self, step: int, shares: Sequence[Share], *, preferences: bool = False) -> list[Microbatch]:
        """The microbatches of a training step. Their dropout keys do not depend on the mesh.

        preferences: as for `lay_out`.
        """
        found = [
            self.lay_out(
                share,
                preferences=preferences,
                dropout_key=self._outline.dropout_key(step, number),
                **self._outline.training_inputs,
            )
            for number, share in enumerate(shares)
        ]
        link_positions(found)
        return found

    def lay_out(self, share: Share, *, preferences: bool = False, **inputs: Any) -> Microbatch:
        """The microbatch with this rank's rows: arguments of the model, and targets.

        preferences: whether the targets are `PreferenceTargets`, and the model computes the targets' losses itself.
        inputs: further arguments of the model, for example dropout_key.
        """
        rows = share.rows
        # documents stay on the host, where lay_out_batch reads them
        tensors: dict[str, Any] = {
            name: each if name == "documents" else each.to(self._device) for name, each in rows.named().items()
        }
        batch = lay_out_batch(
            *(self._mesh, self._plan),
            **tensors,
            numbers=rows.documents if preferences else None,
            rows=share.count,
        )
        inputs |= {"positions": batch.positions, "documents": batch.documents}
        targets: Any = batch.targets
        if preferences:
            inputs["targets"] = batch.targets
            targets = self._preference_targets(share, batch.targets, batch.numbers)
        return Microbatch(args=(batch.tokens,), kwargs=self._outline.select_inputs(inputs), targets=targets)

    def whole_batch(self, step: int, rows: Rows, model: nn.Module, *, preferences: bool = False) -> list[Microbatch]:
        """All rows of a step on this process alone, in microbatches. model: not parallelized.

        preferences: as for `lay_out`.
        """
        tensors = {name: each.to(self._device) for name, each in rows.named().items()}
        tokens, targets = tensors.pop("tokens"), tensors.pop("targets")
        inputs = {"dropout_key": self._outline.dropout_key(step), **tensors, **self._outline.training_inputs}
        if preferences:
            inputs["targets"] = targets
        inputs, size = self._outline.select_inputs(inputs), self._outline.microbatch_rows
        found = divide_batch(model, tokens, targets, self._outline.num_microbatches, inputs)
        if not preferences:
            return found
        assert isinstance(rows, TaskRows), "rows of a task with preferences"
        parts = [rows.select(slice(first, first + size)) for first in range(0, len(tokens), size)]
        shares = [Share(rows=part, first=number * size, count=size) for number, part in enumerate(parts)]
        return [
            replace(each, targets=self._preference_targets(share, each.targets, share.rows.documents))
            for each, share in zip(found, shares, strict=True)
        ]

    def _preference_targets(self, share: Share, targets: Any, numbers: Any) -> PreferenceTargets:
        """The `PreferenceTargets` of a microbatch. targets, numbers: laid out as the model's tokens."""
        rows = share.rows
        assert isinstance(rows, TaskRows), "rows of a task with preferences"
        return PreferenceTargets(
            targets=targets,
            numbers=numbers.to(self._device),
            rows=torch.arange(share.first, share.first + len(rows.tokens), device=self._device),
            valid=(rows.examples >= 0).to(self._device),
            desirable=rows.labels.to(self._device),
        )
