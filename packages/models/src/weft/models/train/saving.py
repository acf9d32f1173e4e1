"""Checkpoints of a run, written from a copy while the run goes on, and read when it is taken up again."""

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
from .config import Run
from .folder import CHECKPOINT, keep
from .saved import describe_run, logged_of, read_saved


class NotSaved(RuntimeError):
    """A checkpoint could not be written; the message says which, and why. Those before it are whole."""


class Saver:
    """Writes checkpoints in a thread of each rank; one at a time, so that the next waits for it.

    blocked, writing: seconds that steps waited for checkpoints, and that were spent on writing them.
    """

    def __init__(self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Communication: a process group of all ranks, over which they agree on who writes what."""
        self._run, self._model, self._optimizer = run, model, optimizer
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=run.config.timeout))
        self._thread: threading.Thread | None = None
        self._copy: Snapshot | None = None  # kept for its memory
        self._error: BaseException | None = None
        self._said: list[str] = []
        self._told = 0  # of these lines
        self.held_out_loss = float("nan")  # before the first step
        self.last: Path | None = None
        self.logged: Mapping[str, Any] | None = None  # what the checkpoint that was read says of metrics.jsonl
        self.count = 0
        self.blocked = self.writing = 0.0

    def resume(self) -> int:
        """Reads the checkpoint that rank 0 goes on with; the steps that were taken, 0 where there is none.

        Communication: a broadcast of its path, and as `load_checkpoint`. Raises ValueError as that does.
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
        return step

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """What is done within it is time that steps wait for a checkpoint."""
        start = time.perf_counter()
        yield
        self.blocked += time.perf_counter() - start

    def save(self, step: int, logged: Mapping[str, Any] | None = None) -> None:
        """Copies all that is to be saved, and begins to write it; what is changed from now on does not show in the file.

        logged: on rank 0, as in `describe_run`.
        Raises NotSaved, on every rank, where the checkpoint before could not be written.
        """
        self.wait()
        document = describe_run(self._run, step, self.held_out_loss, logged)
        with traced("copy"):
            tensors = snapshot(self._model, self._optimizer, run=document, tokenizer=self._run.corpus.tokenizer)
            self._copy = tensors.copied(self._copy)
        folder = self._run.folder / f"{CHECKPOINT}-{step}"
        self._thread = threading.Thread(target=self._write, args=(self._copy, folder), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when what was begun is written. Raises NotSaved, on every rank, where it could not be; what a collective does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if isinstance(self._error, OSError | ValueError):
            raise NotSaved(
                f"a checkpoint could not be written: {self._error}; last checkpoint: {self.last or 'none'}"
            ) from self._error
        if self._error is not None:
            raise self._error

    def last_written(self) -> Path | None:
        """The last checkpoint that is whole, once what was begun has been written or has failed."""
        if self._thread is not None:
            self._thread.join()
        return self.last

    def _write(self, copy: Snapshot, folder: Path) -> None:
        start = time.perf_counter()
        try:
            copy.write(folder, self._group)
        except BaseException as error:  # it is told to the thread that trains
            self._error = error
            return
        self.last = folder
        self.count += 1
        if dist.get_rank() == 0:
            self._remove_old(folder.parent)
        self.writing += time.perf_counter() - start

    def _remove_old(self, folder: Path) -> None:
        """Removes the checkpoints that are not kept. The new one is whole, so nothing ends the run."""
        try:
            said = keep(folder, self._run.config.keep, self._run.config.keep_every)
        except OSError as error:
            said = [f"old checkpoints in {folder} could not be removed: {error.strerror}"]
        self._said += [line for line in said if line not in self._said]

    def take_notes(self) -> list[str]:
        """What is to be said of checkpoints since the last call, of what was written by then."""
        told, self._told = self._told, len(self._said)
        return self._said[told : self._told]
