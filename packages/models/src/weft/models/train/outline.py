"""The facts of a run derived from the configuration alone: mesh, plan, batch, criterion, and a step run on shapes.

`Trainer` builds on an `Outline`; `weft explain` prints the facts, without weights or processes.
"""

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
    """A run's configuration, mesh and parallel plan. Made with `Outline.of` by `Trainer` and `explain`."""

    config: TrainConfig
    mesh: ProcessMesh
    plan: ParallelPlan

    @classmethod
    def of(cls, config: TrainConfig, axes: Mapping[str, int]) -> Outline:
        """The outline of a run.

        config: with a settled plan. axes: the mesh's axes with their sizes.
        """
        plan = dataclasses.replace(own_plan(_make(config)), **config.plan.options(axes.get("pp", 1)))
        return cls(config=config, mesh=ProcessMesh.grid(**axes), plan=plan)

    def make_model(self) -> nn.Module:
        """The model on the meta device (no memory), not yet parallelized."""
        return _make(self.config)

    @property
    def batch(self) -> tuple[int, int]:
        """(sequences in a step, tokens in a sequence)."""
        return self.config.data.batch_size, self.config.data.sequence_length

    @property
    def microbatches(self) -> int:
        """Number of microbatches in a step."""
        return self.config.plan.microbatches or 1

    @property
    def criterion(self) -> Criterion:
        """Cross-entropy over the number of tokens of the global batch.

        The losses of microbatches and ranks then add up to the mean loss of the batch.
        """
        return partial(cross_entropy, denominator=float(math.prod(self.batch)))

    def computing(self, device_type: str) -> AbstractContextManager[None]:
        """The context to call the model in: autocast to the run's dtype, disabled for float32."""
        lower = self.config.dtype != "float32"
        return torch.autocast(device_type, dtype=getattr(torch, self.config.dtype), enabled=lower)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed over ranks."""
        dtype: torch.dtype = getattr(torch, self.config.reduce_dtype)
        return dtype

    def dropout_key(self, step: int, number: int | None = None) -> Tensor:
        """The dropout key of a step, or of microbatch `number` of the step. A scalar uint64."""
        key: int | Tensor = derive_key(self.config.seed, "dropout", step)
        if number is not None:
            key = microbatch_key(key, number, self.microbatches)
        return torch.tensor(key, dtype=torch.uint64)

    def accepted(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The items of `inputs` accepted by the model's forward. Tokens are passed separately."""
        names = inputs_of(self.config.model_class)
        return {name: value for name, value in inputs.items() if name in names}

    def first_step(self, rank: int, device_type: str) -> Step:
        """Record step 1 of `rank`, by running the model on shapes.

        Communication: none, and no process group is needed.
        """
        with self.computing(device_type):
            return run_on_shapes(
                self.make_model(),
                self.mesh,
                self.plan,
                batch=self.batch,
                criterion=self.criterion,
                rank=rank,
                inputs=self.accepted({"dropout_key": self.dropout_key(0)}),
                microbatches=self.microbatches,
                clip_norm=self.config.optimizer.clip_norm,
                reduce_dtype=self.reduce_dtype,
            )


def _make(config: TrainConfig) -> nn.Module:
    with torch.device("meta"):
        return make_model_of(config.model, config.model_class)
