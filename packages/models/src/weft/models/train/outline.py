"""What a run's steps compute, known before there are weights or processes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh, derive_key

from ..microbatches import microbatch_key
from ..parallel import ParallelPlan
from ..parallel.parallelize import own_plan
from ..recording import Criterion, Step, run_on_shapes
from .config import TrainConfig
from .outside import inputs_of, make_model_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A run's model on its mesh, by its plan."""

    config: TrainConfig
    mesh: ProcessMesh
    plan: ParallelPlan

    @classmethod
    def of(cls, config: TrainConfig, axes: Mapping[str, int]) -> Outline:
        """config: with a plan that is settled. axes: of the mesh, and their sizes."""
        plan = dataclasses.replace(own_plan(_make(config)), **config.plan.options(axes.get("pp", 1)))
        return cls(config=config, mesh=ProcessMesh.grid(**axes), plan=plan)

    def make_model(self) -> nn.Module:
        """The model, not parallel yet and without data."""
        return _make(self.config)

    @property
    def batch(self) -> tuple[int, int]:
        """The sequences of a step, and the tokens in each."""
        return self.config.data.batch_size, self.config.data.sequence_length

    @property
    def microbatches(self) -> int:
        """The parts that a batch is taken in."""
        return self.config.plan.microbatches or 1

    @property
    def criterion(self) -> Criterion:
        """The mean loss over the global batch."""
        return partial(cross_entropy, denominator=float(math.prod(self.batch)))

    def computing(self, device_type: str) -> AbstractContextManager[None]:
        """What the model is called in: autocast where the run's dtype is lower than that of its parameters."""
        lower = self.config.dtype != "float32"
        return torch.autocast(device_type, dtype=getattr(torch, self.config.dtype), enabled=lower)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """What gradients are added up in over ranks."""
        dtype: torch.dtype = getattr(torch, self.config.reduce_dtype)
        return dtype

    def dropout_key(self, step: int, number: int | None = None) -> Tensor:
        """Of all microbatches of a step; of one alone where its number is given."""
        key: int | Tensor = derive_key(self.config.seed, "dropout", step)
        if number is not None:
            key = microbatch_key(key, number, self.microbatches)
        return torch.tensor(key, dtype=torch.uint64)

    def taken(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs that the model's forward takes, of those that a run may give it beside its tokens."""
        names = inputs_of(self.config.model_class)
        return {name: value for name, value in inputs.items() if name in names}

    def first_step(self, rank: int, device_type: str) -> Step:
        """What `rank` does in step 1. Communication: none, and no process group is needed."""
        with self.computing(device_type):
            return run_on_shapes(
                self.make_model(),
                self.mesh,
                self.plan,
                batch=self.batch,
                criterion=self.criterion,
                rank=rank,
                inputs=self.taken({"dropout_key": self.dropout_key(0)}),
                microbatches=self.microbatches,
                clip_norm=self.config.optimizer.clip_norm,
                reduce_dtype=self.reduce_dtype,
            )


def _make(config: TrainConfig) -> nn.Module:
    with torch.device("meta"):
        return make_model_of(config.model, config.model_class)
