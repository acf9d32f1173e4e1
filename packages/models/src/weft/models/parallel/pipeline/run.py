"""Runs a pipeline schedule on a cut model: this rank's actions in order, shared parameters, and sums over stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels.extension import sharing_casts
from weft.mesh import ProcessMesh
from weft.reshard import to_global
from weft.reshard.extension import CutModel, GradPlaceholder, group_for, keep_gathered, local_of, this_rank, wait_for

from ...schedules.pipeline_plan import PipelinePlan
from ...schedules.schedule import Action, Schedule
from ...tracing import traced
from ..plan import ParallelPlan
from ..styles import PIPELINE_AXIS
from .failures import Failures
from .messages import Channel, Handover
from .stages import Stages
from .step import CallContext, LossOf, Microbatch, RepeatedActions, RunningStep

Direction = Literal["forward", "backward"]  # of an action
_DTYPE_NAME_BYTES = 32  # bytes in which the name of a dtype is broadcast


def shares_casts(plan: ParallelPlan) -> bool:
    """Whether a pipeline's microbatches share the casts of parameters under autocast (`sharing_casts`).

    False where whole blocks are recomputed: the graphs of these blocks save no casts.
    """
    return plan.recompute != "full"


class Pipeline:
    """A cut model on this rank: stages, schedule, and channels to neighboring stages.

    `parallelize` makes a Pipeline for each cut model; `pipeline_of` finds the model's.
    model: the cut model, with the parameters of this rank's stages.
    plan, schedule: how the model is cut, and the order of actions.
    mesh: the whole mesh, with the axis "pp".
    parameters: the parameters of all stages by name, as meta tensors.
    shares_casts: the result of the function `shares_casts` for the model's plan.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PipelinePlan,
        schedule: Schedule,
        mesh: ProcessMesh,
        stages: Stages,
        parameters: Mapping[str, Tensor],
        *,
        shares_casts: bool,
    ) -> None:
        self.plan, self.schedule, self.mesh, self.stages = plan, schedule, mesh, stages
        self.parameters, self._shares_casts = parameters, shares_casts
        coordinate = mesh.coordinate(this_rank())
        assert coordinate is not None, "a model is laid out on ranks of the mesh"
        self._coordinate = coordinate
        # Of each parameter held by several stages, by name: the coordinates along "pp" of its ranks.
        self.shared = stages.cut.shared(schedule.rank_of)
        # None where one rank holds all stages.
        self._cut_model = CutModel(model) if schedule.ranks > 1 else None
        self.failures = Failures(mesh, is_alone=mesh.size == schedule.ranks)
        self.ran: list[Action] = []  # the actions of the last step, in order
        self.in_flight = 0  # the most microbatches, counted once per stage, held at once in the last step
        self._channels: dict[tuple[str, int], Channel | Handover] = {}  # by "F" or "B", and the stage entered
        # Set in recordings on shapes, because real stages learn the forms of messages from the messages themselves:
        # forms by "F" or "B" and the stage entered, then by `Microbatch.kind`.
        self.forms: Mapping[tuple[str, int], Mapping[Any, Any]] = {}
        self.repeated: RepeatedActions | None = None  # set in recordings on shapes, before a step, and used for it

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        raise TypeError("a model that is cut into stages cannot be copied; parallelize a new model")

    @property
    def stage_mesh(self) -> ProcessMesh:
        """The mesh of this rank's stages: the whole mesh without the axis "pp"."""
        return stage_mesh_of(self.mesh, self._coordinate[PIPELINE_AXIS])

    def is_counted_here(self, name: str) -> bool:
        """Whether this rank counts its parameter `name` where each parameter must count once over "pp".

        False for a shared parameter, except on the first of the ranks along "pp" with the parameter. Asked for the norm
        of gradients (`clip_gradients`), for digests (`Recorder`), and for gradients of earlier steps.
        """
        return name not in self.shared or self.shared[name][0] == self._coordinate[PIPELINE_AXIS]

    def find_gradients(
        self,
        model: nn.Module,
        microbatches: Sequence[Microbatch],
        loss_of: LossOf,
        accumulating: CallContext = nullcontext,
        call_context: CallContext = nullcontext,
        after_phase: Callable[[Direction], None] = lambda direction: None,
    ) -> Exception | None:
        """Run each microbatch forward and backward, in the order of the schedule.

        Returns, on every rank, the error to raise where the work of any rank failed. Before raising, the caller
        synchronizes gradients, so that no rank's collectives are left over.

        loss_of: the loss of a microbatch, called on the ranks of the last stage only.
        accumulating: a context in which backward passes add up gradients without communication; entered once around
            all actions.
        call_context: a context entered around each call of the model.
        after_phase: called after each action, with the action's direction.
        Communication: between neighboring stages, each rank sends activations and receives gradients of activations,
        to and from the rank whose further coordinates are equal. Sharded parameters are gathered once and stay gathered
        until all microbatches are done. At the end as `Failures.meet`.
        Raises RuntimeError after a step that lost messages.
        """
        schedule = self.schedule
        if len(microbatches) != schedule.microbatches:
            schedule = self.plan.make_schedule(schedule.ranks, len(microbatches))
        self._keep_earlier_gradients_once(model)
        step = self._begin(model, microbatches, loss_of, call_context, is_training=True)
        step.repeated, self.repeated = self.repeated, None
        with keep_gathered(model), accumulating(), sharing_casts() if self._shares_casts else nullcontext():
            for action in schedule.actions[self._coordinate[PIPELINE_AXIS]]:
                direction: Direction = "forward" if action.kind == "F" else "backward"
                with traced(direction):
                    step.perform(action)
                after_phase(direction)
            error = step.finish()
        self.finish_sends()
        self.ran, self.in_flight = step.ran, step.most_held
        return error

    def evaluate(self, model: nn.Module, microbatches: Sequence[Microbatch], loss_of: LossOf) -> list[Tensor]:
        """Run each microbatch forward only. Returns what `loss_of` returns, on the ranks of the last stage alone.

        Raises on every rank where the work of any rank failed. Communication: as `find_gradients`, without gradients.
        """
        step = self._begin(model, microbatches, loss_of, is_training=False)
        with keep_gathered(model):
            for stage in self.stages.own:
                for number in range(len(microbatches)):
                    step.perform(Action("F", stage, number))
            error = step.finish()
        self.finish_sends()
        if error is not None:
            raise error
        return step.losses

    def _begin(
        self,
        model: nn.Module,
        microbatches: Sequence[Microbatch],
        loss_of: LossOf,
        call_context: CallContext = nullcontext,
        *,
        is_training: bool,
    ) -> RunningStep:
        """Begin a step. Raises RuntimeError after a step that lost messages."""
        self.failures.refuse_if_lost()
        return RunningStep(
            *(model, microbatches, loss_of),
            schedule=self.schedule,
            stages=self.stages,
            failures=self.failures,
            channel=self.channel,
            call_context=call_context,
            is_training=is_training,
        )

    def sum_shared_gradients(self, model: nn.Module) -> None:
        """Sum the gradients of shared parameters, held by several stages. The sum has equal bits on all stages.

        Communication: for each shared parameter, an all-reduce among the ranks along "pp" with the parameter.
        """
        for name, parameter in self._own_shared_parameters(model):
            coordinates = self.shared[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local = local_of(parameter.grad)
            wait_for(dist.all_reduce(local, group=self._group("shared parameters", coordinates), async_op=True))

    def _keep_earlier_gradients_once(self, model: nn.Module) -> None:
        """Drop the gradients that shared parameters have from earlier steps, except on the first of their stages.

        They are sums over the stages already, and count once in the next sum.
        """
        for name, parameter in self._own_shared_parameters(model):
            grad = parameter.grad
            if grad is None or isinstance(grad, GradPlaceholder) or self.is_counted_here(name):
                continue
            if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
                continue  # a partial sum, from a backward pass after which wait() was not called
            parameter.grad = None

    def _own_shared_parameters(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """(name, parameter) of this rank's trainable shared parameters."""
        for name, coordinates in self.shared.items():
            if self._coordinate[PIPELINE_AXIS] in coordinates:
                parameter = model.get_parameter(name)
                if parameter.requires_grad:
                    yield name, parameter

    def whole_parameter(self, model: nn.Module, name: str, read: Callable[[nn.Module, str], Tensor]) -> Tensor:
        """A parameter of any stage in full, on every rank. Every rank calls this, for all parameters in the same
        order.

        read: returns the parameter, or a copy to use instead; called on the first of the stages with the parameter.
        Communication: as `read` does, and the reshard to Replicate, both on this first stage; two broadcasts over "pp",
        of the dtype's name and of the values.
        """
        first = min(self.schedule.rank_of(stage) for stage in self.stages.cut.parameters[name])
        full: Tensor | None = None
        device = next(model.parameters()).device
        if first == self._coordinate[PIPELINE_AXIS]:
            parameter = read(model, name).detach()
            full = (to_global(parameter) if isinstance(parameter, DTensor) else parameter).contiguous()
        group = self._group("sums", range(self.mesh.axis_size(PIPELINE_AXIS)))
        source = self.mesh.rank_at(**{**self._coordinate, PIPELINE_AXIS: first})
        # Dtypes may differ between stages.
        dtype_name = ("" if full is None else str(full.dtype)).ljust(_DTYPE_NAME_BYTES).encode()
        encoded_dtype = torch.tensor(list(dtype_name), dtype=torch.uint8, device=device)
        dist.broadcast(encoded_dtype, source, group=group)
        if full is None:
            dtype = getattr(torch, bytes(encoded_dtype.tolist()).decode().strip().removeprefix("torch."))
            full = torch.empty(self.parameters[name].shape, dtype=dtype, device=device)
        dist.broadcast(full, source, group=group)
        return full

    def sum_over_stages(self, number: Tensor) -> Tensor:
        """The sum of a number over "pp", on every rank, in the dtype of this rank's number. Dtypes may differ
        between ranks.

        Communication: an all-reduce of a float64, since no rank knows the dtype of a loss on a remote stage.
        """
        group, total = self._group("sums", range(self.mesh.axis_size(PIPELINE_AXIS))), number.double()
        wait_for(dist.all_reduce(total, group=group, async_op=True))
        return total.to(number.dtype)

    def finish_sends(self) -> None:
        """Wait until the peers have received all messages sent."""
        for channel in self._channels.values():
            channel.finish()

    def _group(self, purpose: str, coordinates: Iterable[int]) -> dist.ProcessGroup:
        """The process group of the ranks at these coordinates on "pp", and at this rank's coordinates on further
        axes.
        """
        ranks = [self.mesh.rank_at(**{**self._coordinate, PIPELINE_AXIS: each}) for each in coordinates]
        return group_for(f"pipeline {purpose}", tuple(sorted(ranks)), (PIPELINE_AXIS,))

    def channel(self, direction: str, stage: int, device: torch.device) -> Channel | Handover:
        """The channel that brings activations ("F") into a stage, or the gradients of activations ("B").

        The first call makes all channels, in the same order on all ranks.
        """
        if not self._channels:
            own = self._coordinate[PIPELINE_AXIS]
            stage_mesh = self.stage_mesh
            for later in range(1, self.schedule.num_stages):
                ends = self.schedule.rank_of(later - 1), self.schedule.rank_of(later)
                for each, into in (("F", later), ("B", later - 1)):
                    if ends == (own, own):
                        self._channels[each, into] = Handover()
                    elif own in ends:
                        first, second = (self.mesh.rank_at(**{**self._coordinate, PIPELINE_AXIS: end}) for end in ends)
                        name = f"{each} into stage {into}"
                        self._channels[each, into] = Channel(
                            name, (first, second), this_rank(), stage_mesh, device, self.forms.get((each, into), {})
                        )
        return self._channels[direction, stage]


def stage_mesh_of(mesh: ProcessMesh, coordinate: int) -> ProcessMesh:
    """The mesh of the stages at a coordinate on "pp": the mesh without "pp". A mesh of a single rank where "pp" is the
    only axis.
    """
    if mesh.ndim == 1:
        return ProcessMesh([mesh.rank_at(**{PIPELINE_AXIS: coordinate})], ["dp"])
    return mesh.get_mesh_with_dim(PIPELINE_AXIS, coordinate)
