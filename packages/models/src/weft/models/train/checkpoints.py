"""Checkpoints of a run: saving and resuming, and the JSON document about the run in each checkpoint.

Checkpoints of a run: writing in the background from a copy, and resuming.

The training loop makes a `Saver` on every rank.

The JSON document about the run in each checkpoint: written, read back, and compared with a resumed run.

`Saver` writes the document; `Saver.resume` and `weft train --resume` read the document.
"""

from __future__ import annotations

import dataclasses
import re
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

from ..checkpoint.manifest import RUN, DamagedCheckpoint, Manifest
from ..checkpoint.states import Snapshot, load_checkpoint, snapshot
from ..checks import LARGEST
from ..documents import as_type
from ..tracing import traced
from ..versions import versions
from .config import TrainConfig
from .folder import CHECKPOINT, remove_old
from .metrics_file import METRICS
from .run import Run

_DEEPEST = 8  # dots in an option's name; real options have at most three
# Options fixed for a resumed run: with any change, the losses would belong to neither run.
FIXED = ("seed", "model", "model_class", "from", "data.batch_size", "data.sequence_length", "data.pack", "data.mixture")
# Options without effect on the losses: a resumed run may change these without a note.
FREE = (
    *("output", "resume", "save_every", "keep", "keep_every", "log_every", "eval_every", "check", "timeout", "profile"),
    *("data.path", "data.verify"),
)


class NotSaved(RuntimeError):
    """A checkpoint could not be written. The message says why; earlier checkpoints are complete."""


class Saver:
    """Writes checkpoints in a thread of each rank. Each `save` waits until the previous checkpoint is written."""

    def __init__(self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Communication: a new process group of all ranks, for writing beside the training's collectives."""
        self._run, self._model, self._optimizer = run, model, optimizer
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=run.config.timeout))
        self._thread: threading.Thread | None = None
        self._copy: Snapshot | None = None  # kept for reuse of the memory by the next copy
        self._error: BaseException | None = None
        self._notes: list[str] = []
        self._notes_returned = 0  # how many of _notes `take_notes` has returned
        self.held_out_loss = float("nan")  # the loss before the first step; set by the caller
        self.last: Path | None = None  # the newest complete checkpoint
        # length and checksum of metrics.jsonl, from the resumed checkpoint
        self.logged: Mapping[str, Any] | None = None
        self.count = 0  # checkpoints written
        self.blocked = self.writing = 0.0  # seconds of steps waiting for checkpoints, and of writing checkpoints

    def resume(self) -> int:
        """Load rank 0's checkpoint to resume from, if any; return the number of steps already taken.

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
        return step

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Context whose time is added to `blocked`."""
        start = time.perf_counter()
        yield
        self.blocked += time.perf_counter() - start

    def save(self, step: int, logged: Mapping[str, Any] | None = None) -> None:
        """Copy the model and the optimizer's state, and start writing the copy.

        Later steps do not change the checkpoint.
        logged: on rank 0, as in `describe_run`.
        Raises NotSaved, on every rank, if the previous checkpoint could not be written.
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

    def last_written(self) -> Path | None:
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
        """The lines to print about checkpoints written since the last call."""
        start, self._notes_returned = self._notes_returned, len(self._notes)
        return self._notes[start : self._notes_returned]


def describe_run(run: Run, step: int, held_out_loss: float, logged: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON document for a checkpoint saved after `step` steps: enough to resume from there.

    No random state is saved: random numbers and the order of the data are functions of the seed and the step.
    held_out_loss: the loss before the first step. logged: the length and checksum of metrics.jsonl, from
    `RunningChecksum.as_json`.
    """
    return {
        "step": step,
        "samples": step * run.config.data.batch_size,
        "held_out_loss": held_out_loss,
        "recipe": run.recipe,
        "config": as_json(run.resolved),
        "data": _data_of(run),
        "mesh": run.axes,
        "versions": versions(),
        **({} if logged is None else {METRICS: logged}),
    }


def read_saved(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's JSON document about the run, checking the type of each value.

    A converted checkpoint, saved by no run, may lack entries.
    Raises ValueError for an invalid value, and as `Manifest.read`.
    """
    saved = Manifest.read(checkpoint).document(checkpoint, RUN)
    try:
        for name, kind in _TYPES.items():
            if name in saved:
                as_type(kind, saved[name], name)
        step = saved.get("step", 0)
        if not 0 <= step <= LARGEST:
            raise ValueError(
                f"step is {step if abs(step) < 10**20 else 'a number of many digits'}; steps are 0 to {LARGEST:,}"
            )
        named = re.fullmatch(rf"{CHECKPOINT}-([0-9]+)", checkpoint.resolve().name)
        if "config" in saved and named is not None and int(named[1]) != step:
            raise ValueError(f"step is {step}, but the folder is named {named[0]}")
        if "config" in saved and not {"step", "data"} <= saved.keys():
            raise ValueError("the config of a run is there, but its step or its data is missing")
        if METRICS in saved:
            logged = as_type(_Logged, saved[METRICS], METRICS)
            if min(logged.lines, logged.bytes) < 0:
                raise ValueError(f"{METRICS} has {logged.lines} lines of {logged.bytes} bytes")
    except ValueError as error:
        raise ValueError(
            f"{checkpoint / RUN} is not as a run writes it: {error}; resume from another checkpoint"
        ) from None
    return saved


@dataclasses.dataclass(frozen=True, slots=True)
class _Logged:
    """The types of `RunningChecksum.as_json`'s values."""

    lines: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Data:
    """The types of `_data_of`'s values."""

    tokens: int
    sha256: str


_TYPES: Mapping[str, Any] = {
    "step": int,
    "held_out_loss": float,
    "config": dict[str, Any],
    "data": _Data,
}


def logged_of(saved: Mapping[str, Any], checkpoint: Path, folder: Path) -> Mapping[str, Any] | None:
    """The length and checksum of metrics.jsonl in `saved`, a checkpoint's document; None if absent.

    Also None for a checkpoint outside `folder`, which belongs to another run.
    """
    logged: Mapping[str, Any] | None = saved.get(METRICS)
    return logged if checkpoint.parent.resolve() == folder.resolve() else None


def as_json(config: TrainConfig) -> dict[str, Any]:
    """The config as nested dicts of JSON types. The entry "model" also has the config's class, as "kind"."""
    value = {name.rstrip("_"): each for name, each in dataclasses.asdict(config).items()}
    value["model"] = {"kind": type(config.model).__name__}
    value["model"] |= dataclasses.asdict(config.model)
    plain = _plain(value)
    assert isinstance(plain, dict), "_plain returns a dict for a dict"
    return plain


def check_same_run(saved: Mapping[str, Any], run: Run) -> list[str]:
    """Compare a resumed run with the checkpoint's run; return a line for each changed option.

    saved: the checkpoint's document. Options in FREE do not count, because losses do not depend on these.
    Raises ValueError where an option in FIXED (the model, the seed, ...) or the data differs.
    """
    if "config" not in saved:  # a converted checkpoint, saved by no run
        return []
    before, now = dict(_flat(saved["config"])), dict(_flat(as_json(run.resolved)))
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name) and not _within(name, FREE)]
    for name in changed:
        if _within(name, FIXED):
            raise ValueError(
                f"the checkpoint was saved with {name} {before.get(name)!s:.200}, but this run has {now.get(name)}; "
                f"give the saved value, or start a new run"
            )
    data = _data_of(run)
    for name, value in saved["data"].items():
        if value != data[name]:
            raise ValueError(
                f"the checkpoint was saved by a run on data with {name} {value!s:.200}, but {run.corpus.name} has "
                f"{data[name]}; give the same data, or start a new run"
            )
    return [f"{name} is {now.get(name)}, and was {before.get(name)!s:.200}" for name in changed]


def _data_of(run: Run) -> dict[str, Any]:
    """The identity of the run's data, independent of the path."""
    return {"tokens": run.corpus.num_tokens, "sha256": run.corpus.sha256}


def _within(name: str, names: tuple[str, ...]) -> bool:
    """Whether `name` equals an entry of `names` or is a field below: "data.pack" is within "data"."""
    return any(f"{name}.".startswith(f"{each}.") for each in names)


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested options as (dotted name, value) pairs. Below _DEEPEST dots a dict is returned as a value."""
    for name, each in value.items():
        if isinstance(each, Mapping) and prefix.count(".") < _DEEPEST:
            yield from _flat(each, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", each


def _plain(value: object) -> object:
    """The value in JSON types: tuples as lists, anything unknown by str()."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
