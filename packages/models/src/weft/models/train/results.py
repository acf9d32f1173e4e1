"""The files of a training run, without checkpoints: configuration, plan, metrics, curves and the final model."""

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

from ..checkpoint.adapters import save_lora
from ..checkpoint.huggingface import attempt, raise_on_all, save_pretrained
from ..compare.record_file import DigestFile, Header, StepDigests
from ..data.tokenizer import Tokenizer
from ..parallel import ParallelPlan
from ..safe_files import append, write_anew
from ..terminal import can_show
from ..versions import versions
from .config import TrainConfig
from .folder import CHECKPOINT, CONFIG, NEW, lock, make_new, rename_damaged_checkpoints, replace_folder, tidy
from .metrics_file import (
    METRICS,
    NARROWEST,
    RunningChecksum,
    Trackers,
    check_logged,
    draw_curves,
    draw_load,
    read_curves,
    read_logged,
    save_picture,
)
from .report import PREFERENCE_METRICS, ROUTER_METRICS, Metrics, ParameterLayout, general_name
from .toml import add_checksum, as_toml


class NotWritten(RuntimeError):
    """Metrics or the final model could not be written.

    The message names the file and the reason. Files written earlier are intact.
    """


class Results:
    """The files in a run's folder: config.toml, plan.txt, versions.json, metrics.jsonl, curves.svg, digests.jsonl and
    the final model.

    Made by `train` on every rank; only the rank with `writes` writes. tokenizer: saved with the final model; None: the
    model's own, if any.
    From `begin` until the context is left or the process ends, the folder is locked for this run.
    """

    def __init__(self, folder: Path, *, writes: bool, tokenizer: Tokenizer | None = None) -> None:
        self._folder, self._writes, self._tokenizer = folder, writes, tokenizer
        self._metrics = folder / METRICS
        self._trackers: Trackers | None = None
        self._digests: DigestFile | None = None
        self._lock: int | None = None
        self._damaged: list[Path] = []
        self._checksum = RunningChecksum()
        self._error: Exception | None = None
        self.notes: list[str] = []  # lines to print after `save`

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
        parameters: Sequence[ParameterLayout],
        *,
        step: int = 0,
        logged: Mapping[str, Any] | None = None,
        arithmetic: Mapping[str, Any] | None = None,
    ) -> list[Path]:
        """Make the folder of a new run or reopen the folder of a resumed run, and write config, plan and versions.

        step: steps taken before a run is resumed. Later lines of metrics.jsonl are cut off, because their steps are
        taken again.
        recipe: the name for config.toml; None for a run without a recipe.
        logged: length and checksum of the lines up to `step`, for `check_logged`. None: the lines are not checked.
        arithmetic: from `arithmetic_of`, for plan.txt; None without `plan.exact`.
        Returns, on the writing rank, the new paths of damaged checkpoints after `step`, which are renamed; empty on
        other ranks.
        Communication: with several ranks, a broadcast of the writing rank's error, if any.
        Raises, on every rank, ValueError if a new run's folder exists or cannot be made, if another run has locked
        it, if a complete checkpoint after `step` exists, and as `check_logged` and `read_logged`; OSError if the
        folder cannot be written.
        """
        arguments = recipe, config, plan, mesh, parameters, step, logged, arithmetic
        error = attempt(self._begin, *arguments) if self._writes else None
        raise_on_all(error, dist.is_initialized())
        return self._damaged

    def _begin(
        self,
        recipe: str | None,
        config: TrainConfig,
        plan: ParallelPlan,
        mesh: ProcessMesh,
        parameters: Sequence[ParameterLayout],
        step: int,
        logged: Mapping[str, Any] | None,
        arithmetic: Mapping[str, Any] | None,
    ) -> None:
        if config.resume is None:
            make_new(self._folder)
        else:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self._folder)
        tidy(self._folder)
        if logged is not None:
            check_logged(self._metrics, logged)
        self._damaged = rename_damaged_checkpoints(self._folder, step)
        self._cut(step)
        self._write(CONFIG, add_checksum(as_toml(recipe, config)))
        layouts = {f"{general_name(each.name)}: {each.layout or 'whole'}": None for each in parameters}
        facts = [f"{name}: {value}" for name, value in (arithmetic or {}).items()]
        bits = ["", "the bits of the run depend on", *facts] if facts else []
        self._write("plan.txt", "\n".join([repr(mesh), "", str(plan), "", *layouts, *bits, ""]))
        self._write("versions.json", json.dumps(versions(), indent=2) + "\n")
        self._trackers = Trackers(config.track, self._folder, config)

    def add(self, metrics: Metrics) -> None:
        """Append a line to metrics.jsonl at once, and send the metrics to the trackers.

        After a failed write, no more lines are written, and `sync` raises.
        """
        if self._writes and self._error is None:
            self._error = attempt(self._add, metrics)

    def _add(self, metrics: Metrics) -> None:
        values = dataclasses.asdict(metrics)
        for names in (ROUTER_METRICS, PREFERENCE_METRICS):
            if all(values[name] is None for name in names):  # a model without experts, or a task without rewards
                values = {name: value for name, value in values.items() if name not in names}
        line = json.dumps(values) + "\n"
        append(self._metrics, line.encode())
        self._checksum.add(line)
        if self._trackers is not None:
            self._trackers.add(metrics)

    def begin_digests(self, header: Header, step: int) -> None:
        """Begin or go on with the file of digests. step: steps taken.

        Communication: as in `begin`. Raises ValueError and OSError, on every rank, as `DigestFile`.
        """
        error = attempt(self._begin_digests, header, step) if self._writes else None
        raise_on_all(error, dist.is_initialized())

    def _begin_digests(self, header: Header, step: int) -> None:
        self._digests = DigestFile(self._folder, header, step=step)

    def add_digests(self, digests: StepDigests) -> None:
        """Append a step's digests at once. After a failed write, nothing more is written, and `sync` raises."""
        if self._digests is not None and self._error is None:
            self._error = attempt(self._digests.add, digests)

    @property
    def logged(self) -> dict[str, Any]:
        """Current length and checksum of metrics.jsonl, on the writing rank."""
        return self._checksum.as_json()

    def picture(self, width: int, load: Sequence[Sequence[float]] | None = None, layers: Sequence[int] = ()) -> str:
        """Plot loss and speed for a terminal of `width` columns, and save the plot as curves.svg.

        load, layers: of the experts of each of these layers, drawn below the curves; None without experts.
        Never raises, because the run is complete: errors are part of the returned text.
        """
        try:
            curves = read_curves(self._metrics)
            if not curves.steps:
                return "no curves are drawn: no step was taken"
            shown = draw_curves(curves, width) if width >= NARROWEST else f"no curves are drawn in {width} columns"
        except Exception as error:
            return f"no curves are drawn: {error}"
        lines = [shown] if can_show(shown) else []
        if load is not None and can_show(drawn := draw_load(load, layers, width)):
            lines.append(drawn)
        try:
            save_picture(curves, self._folder / "curves.svg")
        except Exception as error:
            lines.append(f"curves.svg could not be written: {error}")
        return "\n".join(lines)

    def sync(self) -> None:
        """Wait until metrics.jsonl is on the disk.

        Called before a checkpoint is saved: after a crash, the metrics of all earlier steps must be there too.
        Communication: with several ranks, a broadcast of the writing rank's error, if any.
        Raises NotWritten, on every rank, if any line of the run could not be written.
        """
        if self._writes and self._error is None and self._metrics.exists():
            self._error = attempt(self._sync)
        try:
            raise_on_all(self._error, dist.is_initialized())
        except OSError as error:
            raise NotWritten(f"{error.filename or self._metrics} could not be written: {error}") from error

    def _sync(self) -> None:
        append(self._metrics, b"", sync=True)

    def save(self, model: nn.Module, adapter_base: Path | None = None) -> None:
        """Save the final model and tokenizer as the folder `checkpoint`, which transformers loads.

        adapter_base: the folder of the frozen model; only the adapters are then saved, for peft. None: the model is
            saved, with its adapters merged if it has any.
        An earlier folder `checkpoint` is replaced once the new folder is complete; if the old folder cannot be
        removed, a line is added to `notes`, which the loop prints.
        Communication: as `save_pretrained` or `save_lora`, and `sync`. Raises NotWritten on every rank.
        """
        self.sync()
        folder, new = self._folder / CHECKPOINT, self._folder / NEW
        exists = self._writes and os.path.lexists(folder)
        try:
            target = new if exists else folder
            if adapter_base is None:
                save_pretrained(model, target, tokenizer=self._tokenizer)
            else:
                save_lora(model, target, base=str(adapter_base), tokenizer=self._tokenizer)
            raise_on_all(attempt(self._exchange, new, folder) if exists else None, dist.is_initialized())
        except OSError as error:
            raise NotWritten(f"the model could not be written: {error}") from error

    def _exchange(self, new: Path, folder: Path) -> None:
        self.notes += replace_folder(new, folder)

    def _cut(self, step: int) -> None:
        """Cut metrics.jsonl off after `step`, and count the remaining lines."""
        lines = read_logged(self._metrics, step)
        if os.path.lexists(self._metrics):
            self._write(METRICS, "".join(line.text for line in lines))
        for line in lines:
            self._checksum.add(line.text)

    def _write(self, name: str, text: str) -> None:
        write_anew(self._folder / name, text.encode())
