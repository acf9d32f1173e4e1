"""The reference of dpo and kto, whose log-probabilities are compared with the policy's.

`ModelReference`: a frozen model on its own mesh over the run's processes. `AdapterReference`: the policy without
adapters. `PrecomputedReference`: a table of numbers, computed once before the first step.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from weft.reshard import drop_gathered

from ..checkpoint.huggingface import attempt, raise_on_all
from ..data.batches import Rows
from ..data.examples.example import SEGMENTS
from ..data.examples.rows import ExampleBatches
from ..documents import write_anew
from ..parallel import parallelize
from ..parallel.lora import without_adapters
from ..step.preference import log_probabilities
from .config import TrainConfig
from .explanation import Outline
from .feed import Feed, Share
from .initial_weights import draw_weights, load_weights
from .run import Run

TABLE = "reference.npy"  # in the run's folder: the table of a `PrecomputedReference`


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

    Of a reference, or of the model in training, whose rows are read here too.
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


class PrecomputedReference:
    """A table of log-probabilities [examples, segments], computed once before the first step. Every rank has the table.

    The table is also a file in the run's folder, `TABLE`, with the identity of the data and of the reference: a resumed
    run reads the file.
    """

    def __init__(self, run: Run, batches: ExampleBatches, device: torch.device) -> None:
        self._run, self._batches, self._device = run, batches, device
        self._table: Tensor | None = None  # [examples, segments] float32, on the CPU

    def prepare(self, step: int, scorer: Scorer) -> None:
        """Fill the table: for a new run by a reference model, for a resumed run from the file.

        step: the run's first, from 0; 0 for a new run.
        scorer: of the model in training, for a reference that is this model's initial weights. If the config names a
            folder for the reference, the model in the folder is loaded for this call instead.
        Communication: as `Scorer.score` for each batch of all rows, or a broadcast of the table.
        Raises ValueError and OSError on every rank.
        """
        if step == 0:
            self._compute(
                scorer if self._run.reference is None else ModelReference(self._run, self._batches, self._device)
            )
        else:
            assert self._run.resume is not None, "steps were taken before"
            self._load(self._run.resume)

    def _compute(self, scorer: Scorer) -> None:
        """Fill the table, and write the file on rank 0. Communication: as `Scorer.score`."""
        segments, task = SEGMENTS[self._run.config.task], self._run.config.task
        table = torch.zeros(self._batches.num_examples, segments)
        for first in range(0, self._batches.num_every, self._run.config.data.batch_size):
            count = min(self._run.config.data.batch_size, self._batches.num_every - first)
            numbers = self._batches.examples_of_every(slice(first, first + count))  # [count, E]
            valid = numbers >= 0
            if task == "dpo":
                found = scorer.of_every(first, count, 0).float().cpu().view(*numbers.shape, 2)
                table[numbers[valid]] = found[valid]
            else:
                for which in range(segments):
                    table[numbers[valid], which] = scorer.of_every(first, count, which).float().cpu()[valid]
        self._table = table
        writes = dist.get_rank() == 0
        raise_on_all(attempt(self._write, table) if writes else None, dist.is_initialized())

    def _load(self, checkpoint: Path) -> None:
        """Read the run's file, beside `checkpoint`, on rank 0; rank 0 writes the file again into a new folder.

        Communication: a broadcast of the table. Raises, on every rank, ValueError as `_read`, OSError for a failed
        write.
        """
        self._table = torch.zeros(self._batches.num_examples, SEGMENTS[self._run.config.task])
        reads = dist.get_rank() == 0
        raise_on_all(attempt(self._read, checkpoint.parent / TABLE) if reads else None, dist.is_initialized())
        table = self._table.to(self._device)
        dist.broadcast(table, src=0)
        self._table = table.cpu()
        writes = reads and not (self._run.folder / TABLE).exists()
        raise_on_all(attempt(self._write, self._table) if writes else None, dist.is_initialized())

    def _read(self, path: Path) -> None:
        """Read the file into the table.

        Raises ValueError for a missing or changed file, or a file with a different identity.
        """
        assert self._table is not None, "made by _load"
        try:
            identity, digest, content = path.read_bytes().split(b"\n", 2)
            if identity != self._identity():
                raise ValueError("it was computed for other data or another reference")
            if hashlib.sha256(content).hexdigest().encode() != digest:
                raise ValueError("it was changed after it was written")
            self._table.copy_(torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False)))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path}, the reference of the run to resume, cannot be used: {error}; copy the file again, or begin a "
                f"new run"
            ) from None

    def _write(self, table: Tensor) -> None:
        content = io.BytesIO()
        np.save(content, table.numpy(), allow_pickle=False)
        digest = hashlib.sha256(content.getvalue()).hexdigest().encode()
        write_anew(self._run.folder / TABLE, b"\n".join((self._identity(), digest, content.getvalue())))

    def _identity(self) -> bytes:
        """A checksum of the facts on which the table depends: data, task, length of rows, folder of the reference."""
        config = self._run.config
        what = [self._run.corpus.sha256, config.task, config.data.sequence_length, str(config.reference_from)]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest().encode()

    def read(self, step: int, which: int, own: Sequence[Share]) -> Tensor:
        """As `Reference.read`: indices in the table of the step's examples, [rows, E], -1 for none. Reads no token."""
        return self._batches.examples(step, slice(None))

    def of_step(self, step: int, which: int, found: Tensor) -> Tensor:
        """As `Reference.of_step`. Communication: none."""
        return self._look_up(found, which)

    def of_held_out(self, first: int, count: int, which: int) -> Tensor:
        """As `Reference.of_held_out`. Communication: none."""
        return self._look_up(self._batches.held_out_examples(slice(first, first + count)), which)

    def _look_up(self, numbers: Tensor, which: int) -> Tensor:
        """Log-probabilities [rows, documents] from the table, 0 without an example. numbers: as from `read`."""
        assert self._table is not None, "computed or loaded before the first step"
        found = self._table[numbers.clamp(min=0)] * (numbers >= 0)[..., None]  # [rows, E, segments]
        found = found.flatten(1) if self._run.config.task == "dpo" else found[..., which]
        return found.to(self._device)
