"""What a training run leaves on disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from torch import nn
from weft.mesh import Layout, ProcessMesh

from ..checkpoint.huggingface import save_pretrained
from ..parallel import ParallelPlan
from ..versions import versions
from .config import TrainConfig, general_name
from .report import Metrics


class Results:
    """The folder of a run: config.json, plan.txt, versions.json, metrics.jsonl and checkpoints; one rank writes."""

    def __init__(self, folder: Path, *, writes: bool) -> None:
        self._folder, self._writes = folder, writes
        self.last_checkpoint: Path | None = None

    def begin(
        self, config: TrainConfig, plan: ParallelPlan, mesh: ProcessMesh, layouts: Mapping[str, Layout | None]
    ) -> None:
        """Makes the folder, with all that is known before the first step."""
        if not self._writes:
            return
        self._folder.mkdir(parents=True)
        self._write("config.json", json.dumps(dataclasses.asdict(config), indent=2, default=str))
        kinds = {f"{general_name(name)}: {layout or 'whole'}": None for name, layout in layouts.items()}
        self._write("plan.txt", "\n".join([repr(mesh), "", str(plan), "", *kinds]))
        self._write("versions.json", json.dumps(versions(), indent=2))

    def add(self, metrics: Metrics) -> None:
        """A line of metrics.jsonl, there at once."""
        if self._writes:
            with (self._folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(dataclasses.asdict(metrics)) + "\n")

    def save(self, model: nn.Module, name: str) -> None:
        """A checkpoint that transformers loads. Communication: as of `save_pretrained`; every rank calls it."""
        save_pretrained(model, self._folder / name)
        self.last_checkpoint = self._folder / name

    def _write(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text + "\n", encoding="utf-8")
