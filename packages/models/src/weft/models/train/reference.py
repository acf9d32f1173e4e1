"""The reference of dpo and kto, whose log-probabilities are compared with the policy's.

`ModelReference`: a frozen model on its own mesh over the run's processes. `AdapterReference`: the policy without
adapters. `PrecomputedReference`: a table of numbers, computed once, before the first step, for all runs on the data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from weft.reshard import drop_gathered

from ..checkpoint.huggingface import attempt, raise_on_all
from ..data.batches import Rows
from ..data.examples.example import SEGMENTS
from ..data.examples.rows import ExampleBatches
from ..data.examples.source import NOUNS
from ..parallel import parallelize
from ..parallel.lora import without_adapters
from ..step.preference import log_probabilities
from ..terminal import printable
from .config import TrainConfig
from .explanation import Outline
from .feed import Feed, Share
from .initial_weights import draw_weights, load_weights
from .reference_table import (
    TABLE,
    find_data_file,
    find_identities,
    read_table,
    run_identity,
    share_table,
    sources_of,
    write_table,
)
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


PrintLine = Callable[[str], None]


class PrecomputedReference:
    """A table of log-probabilities [examples, segments], filled before the first step. Every rank has the table.

    The table is kept beside the data, a file for each source, for later runs with the same reference, examples and
    dtype; see `find_identities`. A copy, `TABLE` in the run's folder, is for `--resume`: by then, the data may be
    elsewhere and the reference's weights gone.
    """

    def __init__(self, run: Run, batches: ExampleBatches, device: torch.device) -> None:
        self._run, self._batches, self._device = run, batches, device
        self._sources = sources_of(run.corpus)  # type: ignore[arg-type]
        self._table = torch.zeros(batches.num_examples, SEGMENTS[run.config.task])  # float32, on the CPU

    def prepare(self, step: int, scorer: Scorer, print_line: PrintLine) -> None:
        """Fill the table: for a new run from the files beside the data, or by a reference model; for a resumed run
        from the run's copy.

        step: the run's first, from 0; 0 for a new run.
        scorer: of the model in training, for a reference that is this model's initial weights. If the config names a
            folder for the reference, the model in the folder is loaded for this call instead.
        print_line: prints on rank 0.
        Communication: as `find_identities`, a broadcast of the table and, where numbers are missing, as `Scorer.score`
        for each batch of rows and a second broadcast; for a resumed run a broadcast of the table.
        Raises ValueError and OSError on every rank; ValueError for numbers that are not finite, and for a copy that
        cannot be used.
        """
        copy, checkpoint = self._run.folder / TABLE, self._run.resume
        if step == 0:
            self._fill(scorer, print_line)
        else:
            assert checkpoint is not None, "steps were taken before"
            _on_rank_0(self._read_copy, checkpoint.parent / TABLE)
            self._broadcast()
            if (checkpoint.parent / TABLE).resolve() == copy.resolve():
                return
        identity = run_identity(self._run.config, self._run.corpus.sha256)
        _on_rank_0(write_table, copy, identity, self._table)

    def _fill(self, scorer: Scorer, print_line: PrintLine) -> None:
        """Fill the table of a new run, and write the missing files beside the data."""
        is_class = self._run.config.model_class is not None  # the class's code may change: nothing is kept
        identities = None if is_class else find_identities(self._run)
        missing = list(range(len(self._sources)))
        if identities is not None:
            paths = [find_data_file(*each) for each in zip(self._sources, identities, strict=True)]
            missing = self._read_files(paths, identities, print_line)
        if not missing:
            return
        start = time.perf_counter()
        if self._run.reference is not None:
            scorer = ModelReference(self._run, self._batches, self._device)
        self._compute(scorer, missing)
        noun = f"{sum(len(self._sources[each]) for each in missing):,} {NOUNS[self._run.config.task]}s"
        print_line(f"log-probabilities of {noun} under the reference: computed in {time.perf_counter() - start:.0f} s")
        if identities is not None:
            if dist.get_rank() == 0:
                for each in missing:
                    print_line(self._keep(paths[each], identities[each], self._part(each)))
            self._broadcast()  # the numbers of another run, where one was faster

    def _read_files(self, paths: Sequence[Path], identities: Sequence[str], print_line: PrintLine) -> list[int]:
        """Read the files beside the data, on rank 0. Returns the numbers of the sources without a usable file."""
        missing = []
        for number, (path, identity) in enumerate(zip(paths, identities, strict=True)):
            if dist.get_rank() == 0:
                error = attempt(read_table, path, identity, self._part(number))
                if error is None:
                    print_line(f"log-probabilities under the reference: read from {printable(str(path))}")
                elif not isinstance(error, FileNotFoundError):
                    print_line(f"{printable(str(path))} cannot be used, and is computed again: {error}")
                if error is not None:
                    missing.append(number)
        found = [missing]
        dist.broadcast_object_list(found, src=0)
        self._broadcast()
        return found[0]

    def _keep(self, path: Path, identity: str, table: Tensor) -> str:
        """Write a file beside the data, or read the file that another run has kept by now into `table`.

        Returns the line to print, also where the file cannot be written.
        """
        shown = printable(str(path))
        try:
            is_own = share_table(path, identity, table)
        except OSError as error:
            return (
                f"{shown} cannot be written ({error.strerror}): the log-probabilities are kept in "
                f"{printable(str(self._run.folder / TABLE))} for this run alone, and another run computes them again"
            )
        if is_own:
            return f"kept beside the data for later runs: {shown}"
        return f"another run has computed them in the meantime; its numbers are taken: {shown}"

    def _compute(self, scorer: Scorer, missing: Sequence[int]) -> None:
        """Compute the rows of the table for the sources `missing`.

        Communication: as `Scorer.score`. Raises ValueError, on every rank, for numbers that are not finite.
        """
        segments, task, size = self._table.shape[1], self._run.config.task, self._run.config.data.batch_size
        needed = torch.zeros(len(self._table), dtype=torch.bool)
        for each in missing:
            needed[self._slice(each)] = True
        for first in range(0, self._batches.num_every, size):
            count = min(size, self._batches.num_every - first)
            numbers = self._batches.examples_of_every(slice(first, first + count))  # [count, E]
            valid = (numbers >= 0) & needed[numbers.clamp(min=0)]
            if not valid.any():
                continue
            if task == "dpo":
                found = scorer.of_every(first, count, 0).float().cpu().view(*numbers.shape, 2)
                self._table[numbers[valid]] = found[valid]
            else:
                for which in range(segments):
                    self._table[numbers[valid], which] = scorer.of_every(first, count, which).float().cpu()[valid]
        finite = self._table.isfinite().all(1)
        if not finite.all():
            number = int((~finite).nonzero()[0])
            raise ValueError(
                f"the reference's log-probability of example {number + 1} is {self._table[number].tolist()}; look for "
                f"NaN in the reference's weights, or compute in float32"
            )

    def _part(self, number: int) -> Tensor:
        """The part of the table with a source's examples, [examples, segments]: a view."""
        return self._table[self._slice(number)]

    def _slice(self, number: int) -> slice:
        first = sum(map(len, self._sources[:number]))
        return slice(first, first + len(self._sources[number]))

    def _broadcast(self) -> None:
        """Give every rank the table of rank 0."""
        table = self._table.to(self._device)
        dist.broadcast(table, src=0)
        self._table = table.cpu()

    def _read_copy(self, path: Path) -> None:
        """Read `TABLE` of a run into the table. Raises ValueError for a missing, damaged or foreign file."""
        try:
            read_table(path, run_identity(self._run.config, self._run.corpus.sha256), self._table)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path}, the reference of the run to resume, cannot be used: {error}; copy the file again, or begin a "
                f"new run"
            ) from None

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
        found = self._table[numbers.clamp(min=0)] * (numbers >= 0)[..., None]  # [rows, E, segments]
        found = found.flatten(1) if self._run.config.task == "dpo" else found[..., which]
        return found.to(self._device)


def _on_rank_0(function: Callable[..., None], *arguments: object) -> None:
    """Call a function on rank 0. Raises its OSError or ValueError on every rank. Communication: a broadcast."""
    raise_on_all(attempt(function, *arguments) if dist.get_rank() == 0 else None, dist.is_initialized())
