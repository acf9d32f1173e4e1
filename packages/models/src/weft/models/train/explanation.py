"""The `Outline` of a run: the facts derived from the configuration alone.

Mesh, plan, batch, criterion, and a training step run on shapes. `Trainer` builds on an `Outline`; `ExplainedStep`
prints the facts, without weights or processes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh, derive_key
from weft.reshard.extension import Recorded

from ..config import MixtureConfig
from ..parallel import ParallelPlan
from ..parallel.experts.transport import LINKS, Price, price_of, tokens_on_rank
from ..parallel.parallelize import own_plan
from ..parallel.pipeline.cut import ranges_of
from ..parallel.styles import PIPELINE_AXIS
from ..predict.memory import MemoryParts, compose, memory_parts, stage_peaks
from ..schedules.schedule import Schedule
from ..step.alike import block_names
from ..step.criterion import Criterion
from ..step.followed_step import Memory, Peak
from ..step.forward_backward import microbatch_key
from ..step.loss_parts import RouterLosses
from ..step.memory import predict_memory
from ..step.preference import ShapedPreferences
from ..step.record import RecordedStep, SharedRuns, StepShape, run_on_shapes
from .config import TrainConfig
from .model_class import ROUTER, has_router, inputs_of, make_adapted_model
from .optimizer import communicate_update, count_states
from .run import axes_of, reference_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A run's configuration, mesh and parallel plan.

    Made with `Outline.of` by `Trainer` and by the commands with a step on shapes: `weft explain`, `weft check` and
    `weft plan`. Made with `Outline.of_reference` for the reference model of dpo and kto.
    """

    config: TrainConfig
    mesh: ProcessMesh
    plan: ParallelPlan
    tokens_price: Price | None = None  # of both transports of tokens to experts; None without an axis "ep"

    @classmethod
    def of(cls, config: TrainConfig, axes: Mapping[str, int], device_type: str = "cpu") -> Outline:
        """The outline of a run. The parallel plan is the model's own, with the options of `config.plan`.

        Tokens take the cheaper way to experts on an axis "ep", unless `config.plan` names one.
        config: with the options of `config.plan` filled in by `run.complete_plan`. axes: the mesh's axes with their
            sizes. device_type: of the run, "cpu" or "cuda", for the price.
        """
        model_plan = own_plan(_make_on_meta(config))
        options = config.plan.options(axes.get("pp", 1), config.mesh.ep)
        mesh, plan = ProcessMesh.grid(**axes), dataclasses.replace(model_plan, **options)
        price, model = None, config.model
        if plan.experts is not None and isinstance(model, MixtureConfig):
            rows = config.data.batch_size // (config.plan.microbatches or 1)
            price = price_of(
                size=plan.experts.size,
                tokens=tokens_on_rank(mesh, plan.experts, rows, config.data.sequence_length),
                hidden_size=model.hidden_size,
                num_experts=model.num_experts,
                experts_per_token=model.experts_per_token,
                itemsize=getattr(torch, config.dtype).itemsize,
                link=LINKS[device_type],
            )
            experts = dataclasses.replace(plan.experts, tokens=plan.experts.tokens or price.cheaper)
            plan = dataclasses.replace(plan, experts=experts)
        return cls(config=config, mesh=mesh, plan=plan, tokens_price=price)

    @classmethod
    def of_reference(cls, config: TrainConfig, axes: Mapping[str, int], device_type: str = "cpu") -> Outline:
        """The outline of the frozen reference model of dpo or kto: without adapters, on the mesh of the reference.

        Called by `ModelReference` in a run, and by `weft explain` and `weft check` for the reference's memory.
        config, axes: of the run. Raises ValueError as `reference_config`.
        """
        config, sizes = reference_config(config, axes)
        return cls.of(config, axes_of(**sizes), device_type)

    @property
    def tokens_line(self) -> str | None:
        """How tokens come to experts on an axis "ep", and why, in words; None without such an axis."""
        experts, price = self.plan.experts, self.tokens_price
        if experts is None or price is None:
            return None
        why = "as --plan.experts-tokens says" if self.config.plan.experts_tokens else "the cheaper one"
        return f"tokens come to experts over ep={experts.size} by {experts.tokens}, {why}: {price}"

    def make_model(self) -> nn.Module:
        """The model on the meta device (no memory), not yet parallelized."""
        return _make_on_meta(self.config)

    @property
    def batch_shape(self) -> tuple[int, int]:
        """(rows in a step, tokens in a row). A row of the task dpo has room for two sequences."""
        width = self.config.data.sequence_length * (2 if self.config.task == "dpo" else 1)
        return self.config.data.batch_size, width

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches in a step."""
        return self.config.plan.microbatches or 1

    @property
    def microbatch_rows(self) -> int:
        """Rows of a microbatch, over all ranks. `Feed` cuts batches into microbatches of these rows."""
        return self.batch_shape[0] // self.num_microbatches

    def token_criterion(self, denominator: float) -> Criterion:
        """The summed cross-entropy over `denominator`, plus the routers' losses for a model with experts.

        Called by `TokenObjective` for each step, and by `step_shape`.
        denominator: the number of learned tokens in the global batch; losses of microbatches and ranks then add up.
        """
        return self.with_routers(partial(cross_entropy, denominator=denominator))

    def with_routers(self, criterion: Criterion) -> Criterion:
        """`criterion` with the routers' losses added, for training steps of a model with experts; else `criterion`.

        Called by `token_criterion`, and by `PreferenceObjective` for dpo and kto; not for held-out losses.
        """
        model = self.config.model
        if not self.training_inputs or not isinstance(model, MixtureConfig):
            return criterion
        balance, z = model.router_aux_loss_coef, model.router_z_loss_coef
        return RouterLosses(criterion, balance=balance, z=z, microbatches=self.num_microbatches)

    @property
    def training_inputs(self) -> dict[str, Any]:
        """Inputs of the model in training steps, added by `Feed`; not in evaluations.

        router=True, for a model that returns router statistics; else empty.
        """
        return {ROUTER: True} if has_router(self.config.model, self.config.model_class) else {}

    @property
    def bias_rate(self) -> float:
        """How much the correction biases of experts change after a step; 0 for a model without."""
        return self.config.model.bias_rate if isinstance(self.config.model, MixtureConfig) else 0.0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that layers compute in."""
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return dtype

    def autocast_context(self, device_type: str) -> AbstractContextManager[None]:
        """The context to call the model in: autocast to the run's dtype, disabled for float32."""
        return torch.autocast(device_type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed over ranks."""
        dtype: torch.dtype = getattr(torch, self.config.reduce_dtype)
        return dtype

    def dropout_key(self, step: int, number: int | None = None) -> Tensor:
        """The dropout key of a step, or of microbatch `number` of the step, both from 0. A scalar uint64, on the CPU.

        `Feed` passes the key to the model as the input dropout_key.
        """
        key: int | Tensor = derive_key(self.config.seed, "dropout", step)
        if number is not None:
            key = microbatch_key(key, number, self.num_microbatches)
        return torch.tensor(key, dtype=torch.uint64)

    def select_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The items of `inputs` that the model's forward takes, by name. Called by `Feed` for each microbatch.

        Tokens are not among these inputs: the model gets tokens as a positional argument.
        """
        names = (*inputs_of(self.config.model_class), *self.training_inputs)
        return {name: value for name, value in inputs.items() if name in names}

    def step_shape(self, rank: int, documents: Tensor | None = None, examples_per_row: int = 1) -> StepShape:
        """The batch, criterion and inputs of a step on shapes, for `rank` to run.

        documents: [rows, T], the number of each token's document, where keys are exchanged by the documents of the
            batch; None: the step is predicted without documents.
        examples_per_row: for dpo and kto, the most examples in a row.
        """
        extra: dict[str, Any] = {} if documents is None else {"documents": documents}
        model = self.config.model
        if self.batch_shape[1] > model.max_seq_len and not model.is_length_independent:
            # of dpo: counted from the row's start, positions would pass the model's last
            extra["positions"] = torch.empty(self.batch_shape, dtype=torch.int64, device="meta")
        criterion = self.token_criterion(float(math.prod(self.batch_shape)))
        if self.config.task in ("dpo", "kto"):
            extra["targets"] = torch.empty(self.batch_shape, dtype=torch.int64, device="meta")
            is_normalized = self.config.dpo.loss == "ipo" or self.config.dpo.length_normalized
            criterion = self.with_routers(
                ShapedPreferences(self.config.task, examples_per_row, length_normalized=is_normalized)
            )
        return StepShape(
            batch=self.batch_shape,
            criterion=criterion,
            rank=rank,
            inputs=self.select_inputs({"dropout_key": self.dropout_key(0)} | extra | self.training_inputs),
            microbatches=self.num_microbatches,
            reduce_dtype=self.reduce_dtype,
        )

    def record_step(
        self,
        rank: int,
        device_type: str,
        documents: Tensor | None = None,
        examples_per_row: int = 1,
        listen: Callable[[Recorded], None] | None = None,
        shared: SharedRuns | None = None,
    ) -> RecordedStep:
        """Predict the collectives, layouts and schedule of `rank` in a step, by running the model on shapes.

        documents, examples_per_row: as for `step_shape`.
        Called by `Trainer` on rank 0, by `weft explain` for a single rank, and by `check_run` for many ranks.
        listen: called with the recording before the model is laid out, to set listeners; None: no listeners.
        shared: results shared by runs of several ranks of this outline; None for a single run.
        The forward passes of a reference, and of kto's mismatched rows, are not part of the prediction.
        Nothing is trained. Communication: none, and no process group is needed.
        """
        shape = self.step_shape(rank, documents, examples_per_row)
        clip_norm = self.config.optimizer.clip_norm
        update = partial(communicate_update, config=self.config.optimizer)
        with self.autocast_context(device_type):
            return run_on_shapes(
                *(self.make_model(), self.mesh, self.plan, shape),
                clip_norm=clip_norm, update=update, listen=listen, shared=shared,
            )  # fmt: skip

    def memory_parts(self, rank: int) -> MemoryParts | None:
        """The parts of the memory of `rank` in a step on a GPU; None where blocks are few or not alike.

        Called by `weft explain`, for `predict_peak` to add the parts up to the depth of the model.
        The update's memory is not included: torch's fused optimizers need none, and Muon's few matrices come when the
        activations are gone. Communication: none.
        """
        model, clip_norm = self.make_model(), self.config.optimizer.clip_norm
        states, shape = count_states(model, self.config.optimizer), self.step_shape(rank)
        with self.autocast_context("cpu"), suppress(ValueError):
            return memory_parts(model, self.mesh, self.plan, shape, states=states, clip_norm=clip_norm)
        return None

    def predict_peak(self, rank: int, schedule: Schedule | None, parts: MemoryParts | None) -> Peak:
        """Predict the memory of `rank` at the peak of a step on a GPU. Called by `weft explain`. Communication: none.

        schedule: of the pipeline; None without stages. parts: of `memory_parts`. None: the whole step runs on shapes,
            which costs more. The whole step also runs under a schedule with separate actions for gradients of weights.
        """
        if parts is None or (schedule is not None and schedule.splits_backward):
            whole = self.predict_memory(rank).peak
            assert whole is not None, "the memory of a step"
            return whole
        if schedule is None:
            return compose(parts, blocks=len(block_names(self.make_model(), self.plan)))
        assert self.plan.pipeline is not None, "a schedule is of a pipeline"
        _, ranges = ranges_of(self.make_model(), self.plan.pipeline, schedule)
        coordinate = self.mesh.coordinate(rank)
        assert coordinate is not None, "the rank is one of the mesh"
        return stage_peaks(parts, schedule, ranges)[coordinate[PIPELINE_AXIS]]

    def predict_memory(self, rank: int) -> Memory:
        """Predict the memory of `rank` in a step on a GPU, by running the whole step on shapes. Communication: none.

        Called by `predict_peak`, and by `weft check`.
        """
        shape, model = self.step_shape(rank), self.make_model()
        with self.autocast_context("cpu"):
            return predict_memory(
                *(model, self.mesh, self.plan),
                rank=rank,
                states=count_states(model, self.config.optimizer),
                batch=shape.batch,
                criterion=shape.criterion,
                inputs=shape.inputs,
                microbatches=shape.microbatches,
                clip_norm=self.config.optimizer.clip_norm,
                reduce_dtype=shape.reduce_dtype,
            )


def _make_on_meta(config: TrainConfig) -> nn.Module:
    """The config's model on the meta device, with its adapters if any."""
    with torch.device("meta"):
        return make_adapted_model(config)
