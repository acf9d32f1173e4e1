"""What a training run leaves on disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from torch import nn
from weft.mesh import Layout, ProcessMesh

from ..checkpoint import save_pretrained
from ..data.tokenizer import Tokenizer
from ..parallel import ParallelPlan
from ..versions import versions
from .config import TrainConfig, general_name
from .plot import drawn, read_curves, save_picture
from .report import Metrics
from .toml import as_toml
from .trackers import Trackers


class Results:
    """The folder of a run: config.toml, plan.txt, versions.json, metrics.jsonl, a picture and checkpoints; one rank writes."""

    def __init__(self, folder: Path, *, writes: bool, tokenizer: Tokenizer | None = None) -> None:
        self._folder, self._writes, self._tokenizer = folder, writes, tokenizer
        self._trackers: Trackers | None = None
        self.last_checkpoint: Path | None = None

    def begin(
        self,
        recipe: str,
        config: TrainConfig,
        plan: ParallelPlan,
        mesh: ProcessMesh,
        layouts: Mapping[str, Layout | None],
    ) -> None:
        """Makes the folder, with all that is known before the first step."""
        if not self._writes:
            return
        self._folder.mkdir(parents=True)
        self._write("config.toml", as_toml(recipe, config))
        kinds = {f"{general_name(name)}: {layout or 'whole'}": None for name, layout in layouts.items()}
        self._write("plan.txt", "\n".join([repr(mesh), "", str(plan), "", *kinds]))
        self._write("versions.json", json.dumps(versions(), indent=2))
        self._trackers = Trackers(config.track, self._folder, config)

    def add(self, metrics: Metrics) -> None:
        """A line of metrics.jsonl, there at once."""
        if self._writes:
            with self._metrics.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(metrics)) + "\n")
            if self._trackers is not None:
                self._trackers.add(metrics)

    def picture(self, width: int) -> str:
        """Loss and speed, for a terminal of `width` columns; the same is saved as curves.svg."""
        curves = read_curves(self._metrics)
        save_picture(curves, self._folder / "curves.svg")
        return drawn(curves, width)

    @property
    def _metrics(self) -> Path:
        return self._folder / "metrics.jsonl"

    def save(self, model: nn.Module, name: str) -> None:
        """A checkpoint that transformers loads, with the tokenizer. Communication: as of `save_pretrained`; every rank calls it."""
        save_pretrained(model, self._folder / name, tokenizer=self._tokenizer)
        self.last_checkpoint = self._folder / name

    def _write(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text + "\n", encoding="utf-8")
