"""Checkpoints of a run: writing in the background from a copy, and resuming.

The training loop makes a `Saver` on every rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.manifest import DamagedCheckpoint
from ..checkpoint.states import Snapshot, load_checkpoint, snapshot
from ..tracing import traced
from .digests import arithmetic_of, end_of_bits
from .folder import CHECKPOINT, remove_old
from .run import Run
from .saved_run import describe_run, logged_of, read_saved


class NotSaved(RuntimeError):
    """A checkpoint could not be written. The message says why; earlier checkpoints are complete.

    Raised by `Saver.save` and `Saver.wait`; `train` turns NotSaved into a TrainingError.
    """


class Saver:
    """Writes checkpoints in a thread of each rank. Each `save` waits until the previous checkpoint is written."""

    def __init__(self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Communication: a new process group of all ranks, for writing beside the training's collectives."""
        self._run, self._model, self._optimizer = run, model, optimizer
        # the facts on which the run's bits depend, for checkpoints and plan.txt; None without `plan.exact`
        self.arithmetic = arithmetic_of(run.config, next(model.parameters()).device)
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=run.config.timeout))
        self._thread: threading.Thread | None = None
        self._copy: Snapshot | None = None  # kept for reuse of the memory by the next copy
        self._error: BaseException | None = None
        self._notes: list[str] = []
        self._notes_returned = 0  # how many of _notes `take_notes` has returned
        self.held_out_loss: float | None = None  # before step 1, set by the loop or by `resume`
        self.last: Path | None = None  # the newest complete checkpoint
        # Set by `resume`: length and checksum of metrics.jsonl from the checkpoint, for the check of `Results.begin`.
        self.logged: Mapping[str, Any] | None = None
        self.count = 0  # checkpoints written
        self.blocked = self.writing = 0.0  # seconds of steps waiting for checkpoints, and of writing checkpoints

    def resume(self) -> int:
        """Load rank 0's checkpoint to resume from, if any; return the number of steps already taken.

        Called by the loop before the first step. Also sets `last`, `logged` and `held_out_loss`.
        Communication: a broadcast of the path, then as `load_checkpoint`. Raises ValueError as `load_checkpoint`.
        """
        paths = [self._run.resume]
        dist.broadcast_object_list(paths, src=0)
        path = paths[0]
        if path is None:
            return 0
        saved = read_saved(path)
        try:
            load_checkpoint(self._model, path, self._optimizer)
        except DamagedCheckpoint as error:
            raise ValueError(f"{error} by --resume PATH") from None
        self.last = path
        self.logged = logged_of(saved, path, self._run.folder)
        self.held_out_loss = saved.get("held_out_loss", self.held_out_loss)
        step: int = saved.get("step", 0)
        self._notes += end_of_bits(saved, self.arithmetic, step)
        return step

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Context of the loop around a save: the context's time is added to `blocked`, in seconds."""
        start = time.perf_counter()
        yield
        self.blocked += time.perf_counter() - start

    def save(self, step: int, logged: Mapping[str, Any] | None = None) -> None:
        """Copy the model and the optimizer's state, and start writing the copy in a thread.

        Called by every rank at --save-every, when the run is told to stop, and after the last step for a model class
        of the user's own. Later steps do not change the checkpoint.
        step: steps taken. logged: `Results.logged` on rank 0, the length and checksum of metrics.jsonl.
        Communication: none here; in the thread as `Snapshot.write`, in a process group of the Saver's own.
        Raises NotSaved, on every rank, if the previous checkpoint could not be written.
        """
        self.wait()
        document = describe_run(self._run, step, self.held_out_loss, logged, self.arithmetic)
        with traced("copy"):
            content = snapshot(self._model, self._optimizer, run=document, tokenizer=self._run.corpus.tokenizer)
            self._copy = content.copy_to_cpu(self._copy)
        folder = self._run.folder / f"{CHECKPOINT}-{step}"
        self._thread = threading.Thread(target=self._write, args=(self._copy, folder), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint in progress is written.

        Raises NotSaved, on every rank, after a failed write; an error of a collective is raised unchanged.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if isinstance(self._error, OSError | ValueError):
            raise NotSaved(
                f"a checkpoint could not be written: {self._error}; last checkpoint: {self.last or 'none'}"
            ) from self._error
        if self._error is not None:
            raise self._error

    def wait_for_newest(self) -> Path | None:
        """Wait until the checkpoint in progress is written or has failed; return the newest complete checkpoint."""
        if self._thread is not None:
            self._thread.join()
        return self.last

    def _write(self, copy: Snapshot, folder: Path) -> None:
        """The thread: write the copy, then remove old checkpoints."""
        start = time.perf_counter()
        try:
            copy.write(folder, self._group)
        except BaseException as error:  # raised by `wait` in the training thread
            self._error = error
            return
        self.last = folder
        self.count += 1
        if dist.get_rank() == 0:
            self._remove_old(folder.parent)
        self.writing += time.perf_counter() - start

    def _remove_old(self, folder: Path) -> None:
        """Remove old checkpoints, as --keep and --keep-every demand.

        A failure becomes a note and does not end the run, because the new checkpoint is complete.
        """
        try:
            lines = remove_old(folder, self._run.config.keep, self._run.config.keep_every)
        except OSError as error:
            lines = [f"old checkpoints in {folder} could not be removed: {error.strerror}"]
        self._notes += [line for line in lines if line not in self._notes]

    def take_notes(self) -> list[str]:
        """The lines added since the last call, for the loop to print: about removed checkpoints, and, after `resume`,
        about facts whose change ends the equality of bits.
        """
        start, self._notes_returned = self._notes_returned, len(self._notes)
        return self._notes[start : self._notes_returned]
