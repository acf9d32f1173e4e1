"""What a training run leaves on disk."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from weft.mesh import ProcessMesh

from ..checkpoint.huggingface import attempt, raise_on_all, save_pretrained
from ..data.tokenizer import Tokenizer
from ..output import can_show
from ..parallel import ParallelPlan
from ..versions import versions
from .config import TrainConfig, general_name
from .files import append, write_anew
from .folder import CHECKPOINT, CONFIG, NEW, exchange, lock, make_new, set_aside, tidy
from .logged import METRICS, Sum, check_logged, read_logged
from .plot import NARROWEST, drawn, read_curves, save_picture
from .report import Metrics, Part
from .toml import as_toml, with_sum
from .trackers import Trackers


class NotWritten(RuntimeError):
    """Metrics or the model could not be written; the message says which, and why. What was written before is whole."""


class Results:
    """The folder of a run: config.toml, plan.txt, versions.json, metrics.jsonl, a picture and checkpoints; one rank writes.

    From `begin` until it is left, or its process ends, no other run writes there.
    """

    def __init__(self, folder: Path, *, writes: bool, tokenizer: Tokenizer | None = None) -> None:
        self._folder, self._writes, self._tokenizer = folder, writes, tokenizer
        self._metrics = folder / METRICS
        self._trackers: Trackers | None = None
        self._lock: int | None = None
        self._aside: list[Path] = []
        self._sum = Sum()
        self._error: Exception | None = None
        self.notes: list[str] = []

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            os.close(self._lock)

    def begin(
        self,
        recipe: str | None,
        config: TrainConfig,
        plan: ParallelPlan,
        mesh: ProcessMesh,
        parts: Sequence[Part],
        *,
        step: int = 0,
        logged: Mapping[str, Any] | None = None,
    ) -> list[Path]:
        """Makes the folder, with all that is known before the first step; or takes it up again at `step`.

        Its metrics are then those up to that step: the lines of steps that are taken once more are cut off.
        logged: what is known of these lines, as `check_logged` takes it.
        Returns, on the one that writes, where it has put damaged checkpoints of later steps.
        Communication: where there are several ranks, a broadcast of how it went on the one that writes.
        Raises ValueError where another run is in the folder or has made it, and as `check_logged` and `read_logged`; OSError
        where it cannot be written; on every rank.
        """
        error = attempt(self._begin, recipe, config, plan, mesh, parts, step, logged) if self._writes else None
        raise_on_all(error, dist.is_initialized())
        return self._aside

    def _begin(
        self,
        recipe: str | None,
        config: TrainConfig,
        plan: ParallelPlan,
        mesh: ProcessMesh,
        parts: Sequence[Part],
        step: int,
        logged: Mapping[str, Any] | None,
    ) -> None:
        if config.resume is None:
            make_new(self._folder)
        else:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self._folder)
        tidy(self._folder)
        if logged is not None:
            check_logged(self._metrics, logged)
        self._aside = set_aside(self._folder, step)
        self._cut(step)
        self._write(CONFIG, with_sum(as_toml(recipe, config)))
        kinds = {f"{general_name(part.name)}: {part.layout or 'whole'}": None for part in parts}
        self._write("plan.txt", "\n".join([repr(mesh), "", str(plan), "", *kinds, ""]))
        self._write("versions.json", json.dumps(versions(), indent=2) + "\n")
        self._trackers = Trackers(config.track, self._folder, config)

    def add(self, metrics: Metrics) -> None:
        """A line of metrics.jsonl, there at once. Where it cannot be written none is after it, and `sync` says so."""
        if self._writes and self._error is None:
            self._error = attempt(self._add, metrics)

    def _add(self, metrics: Metrics) -> None:
        line = json.dumps(dataclasses.asdict(metrics)) + "\n"
        append(self._metrics, line.encode())
        self._sum.add(line)
        if self._trackers is not None:
            self._trackers.add(metrics)

    @property
    def logged(self) -> dict[str, Any]:
        """What is known of the lines of metrics.jsonl so far, on the rank that writes."""
        return self._sum.as_json()

    def picture(self, width: int) -> str:
        """Loss and speed, for a terminal of `width` columns; the same is saved as curves.svg.

        The run is done by then, so nothing is raised: what cannot be drawn or saved is told instead.
        """
        try:
            curves = read_curves(self._metrics)
            if not curves.steps:
                return "no curves are drawn: no step was taken"
            shown = drawn(curves, width) if width >= NARROWEST else f"no curves are drawn in {width} columns"
        except Exception as error:
            return f"no curves are drawn: {error}"
        said = [shown] if can_show(shown) else []
        try:
            save_picture(curves, self._folder / "curves.svg")
        except Exception as error:
            said.append(f"curves.svg could not be written: {error}")
        return "\n".join(said)

    def sync(self) -> None:
        """Returns when the disk has the metrics: a checkpoint of a later moment is to be found with all that came before.

        Communication: where there are several ranks, a broadcast of how it went on the one that writes. Raises NotWritten, on
        every rank, where a line since the last call could not be.
        """
        if self._writes and self._error is None and self._metrics.exists():
            self._error = attempt(self._sync)
        try:
            raise_on_all(self._error, dist.is_initialized())
        except OSError as error:
            raise NotWritten(f"{self._metrics} could not be written: {error}") from error

    def _sync(self) -> None:
        append(self._metrics, b"", sync=True)

    def save(self, model: nn.Module) -> None:
        """The folder `checkpoint` that transformers loads, with the tokenizer, in the place of one that is there.

        That one is removed when the new one is whole. notes: has a line then where it could not be removed.
        Communication: as of `save_pretrained` and `sync`. Raises NotWritten as that does.
        """
        self.sync()
        folder, new = self._folder / CHECKPOINT, self._folder / NEW
        is_there = self._writes and os.path.lexists(folder)
        try:
            save_pretrained(model, new if is_there else folder, tokenizer=self._tokenizer)
            raise_on_all(attempt(self._exchange, new, folder) if is_there else None, dist.is_initialized())
        except OSError as error:
            raise NotWritten(f"the model could not be written: {error}") from error

    def _exchange(self, new: Path, folder: Path) -> None:
        self.notes += exchange(new, folder)

    def _cut(self, step: int) -> None:
        lines = read_logged(self._metrics, step)
        if os.path.lexists(self._metrics):
            self._write(METRICS, "".join(line.text for line in lines))
        for line in lines:
            self._sum.add(line.text)

    def _write(self, name: str, text: str) -> None:
        write_anew(self._folder / name, text.encode())
