"""Runs a schedule on a cut model: the actions of this rank in their order, and the messages between stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor
from weft.kernels.weights import Later, waiting_weights, weights_may_wait
from weft.mesh import ProcessMesh
from weft.reshard import to_global
from weft.reshard.running.groups import group_for, this_rank
from weft.reshard.running.trees import tensors_of
from weft.reshard.running.units import keeping_gathered
from weft.reshard.running.waiting import Waiting
from weft.reshard.running.waits import wait_for

from ...communication import Phase
from ...losses import first_gradient
from ...schedules.plan import PipelinePlan
from ...schedules.schedule import Action, Schedule
from ...tracing import traced
from ..styles import PIPELINE_AXIS
from .channels import Channel, Handover
from .stages import Stages

Within = Callable[[], AbstractContextManager[Any]]
_WORDS = 32  # bytes that the name of a dtype takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """What the model and its loss are called with. targets: of the criterion. kind: equal where all shapes are."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    targets: Any = None

    @property
    def kind(self) -> Any:
        return tuple(tuple(each.shape) for each in tensors_of((self.args, self.kwargs))), torch.is_grad_enabled()


LossOf = Callable[[Any, Microbatch], Tensor]


class Pipeline:
    """A cut model on this rank: its stages, its schedule, and its neighbors. mesh: with the axis "pp".

    parameters: those of all stages, without data. ran: the actions of the last step, in order. in_flight: the most microbatches
    on a stage that were held at once. forms: of the messages into a stage, "F" or "B", where they are known beforehand.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        schedule: Schedule,
        mesh: ProcessMesh,
        stages: Stages,
        parameters: Mapping[str, Tensor],
    ) -> None:
        self.plan, self.schedule, self.mesh, self.stages = plan, schedule, mesh, stages
        self.parameters = parameters
        coordinate = mesh.coordinate(this_rank())
        assert coordinate is not None, "a model is laid out on ranks of the mesh"
        self._at = coordinate
        self.shared = stages.cut.shared(schedule.rank_of)
        self.ran: list[Action] = []
        self.in_flight = 0
        self._channels: dict[tuple[str, int], Channel | Handover] = {}
        self._earlier: dict[str, Tensor] = {}  # gradients of shared parameters, of steps before this one
        self.forms: Mapping[tuple[str, int], Mapping[Any, Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        raise TypeError("a model that is cut into stages is not copied; parallelize a new one")

    @property
    def stage_mesh(self) -> ProcessMesh:
        """Of the stages of this rank, without the axis "pp"."""
        return stage_mesh_of(self.mesh, self._at[PIPELINE_AXIS])

    def is_counted_here(self, name: str) -> bool:
        """Whether the first ranks, along "pp", that have a parameter are those of this one."""
        return name not in self.shared or self.shared[name][0] == self._at[PIPELINE_AXIS]

    def find_gradients(
        self,
        model: nn.Module,
        microbatches: Sequence[Microbatch],
        loss_of: LossOf,
        accumulating: Within = nullcontext,
        computing: Within = nullcontext,
        ended: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        """Takes each microbatch forward and backward.

        loss_of: of the model's output, a scalar, asked for on the ranks of the last stage. accumulating: in it backward passes only add up. computing: what the model is
        called in. ended: called after each action.
        Communication: of activations, and of their gradients, to the rank in the same place of the next stage. What parameters on
        shards are gathered to stays until all microbatches are back, so that it is gathered once.
        """
        schedule = self.schedule
        if len(microbatches) != schedule.microbatches:
            schedule = self.plan.make_schedule(schedule.ranks, len(microbatches))
        self._set_aside(model)
        run = _Run(self, model, microbatches, loss_of, computing)
        with keeping_gathered(model), accumulating():
            for action in schedule.actions[self._at[PIPELINE_AXIS]]:
                phase: Literal["forward", "backward"] = "forward" if action.kind == "F" else "backward"
                with traced(phase):
                    run.take(action)
                ended(phase)
        self.ran, self.in_flight = run.ran, run.most_held
        run.finish()

    def forward(self, model: nn.Module, microbatches: Sequence[Microbatch]) -> list[Any]:
        """Takes each microbatch forward alone; what the model gave, on the ranks of the last stage, else none."""
        run = _Run(self, model, microbatches, None)
        with keeping_gathered(model):
            for stage in self.stages.own:
                for number in range(len(microbatches)):
                    run.take(Action("F", stage, number))
        run.finish()
        return run.outputs

    def add_shared(self, model: nn.Module) -> None:
        """Adds up this step's gradients of parameters that several stages have: equal to the bit on all of them.

        They are added to what was there before the step. Communication: for each such parameter an all-reduce between the ranks, one
        of each of these stages, that have this shard.
        """
        for name, parameter in self._shared_here(model):
            coordinates = self.shared[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local = _local(parameter.grad)
            wait_for(dist.all_reduce(local, group=self._group("shared parameters", coordinates), async_op=True))
            earlier = self._earlier.pop(name, None)
            if earlier is not None:
                local.add_(_local(earlier))

    def _set_aside(self, model: nn.Module) -> None:
        """Takes gradients of earlier steps off shared parameters: they are sums over the stages already, and no addends."""
        self._earlier.clear()
        for name, parameter in self._shared_here(model):
            grad = parameter.grad
            if grad is None or isinstance(grad, Waiting):
                continue
            if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
                continue  # an addend, of a pass that no wait() has followed
            self._earlier[name], parameter.grad = grad, None

    def _shared_here(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The parameters that stages of other ranks have too, and that learn."""
        for name, coordinates in self.shared.items():
            if self._at[PIPELINE_AXIS] in coordinates:
                parameter = model.get_parameter(name)
                if parameter.requires_grad:
                    yield name, parameter

    def whole_parameter(self, model: nn.Module, name: str, read: Callable[[nn.Module, str], Tensor]) -> Tensor:
        """A parameter of any stage, whole, on every rank. Every rank calls it, for all parameters in one order.

        read: gives the parameter, or a copy to take in its place, on the ranks of a stage that has it.
        Communication: that of `read`; on the ranks of a stage that has it the reshard to Replicate; two broadcasts over "pp",
        of its dtype and of its numbers.
        """
        first = min(self.schedule.rank_of(stage) for stage in self.stages.cut.parameters[name])
        whole: Tensor | None = None
        device = next(model.parameters()).device
        if first == self._at[PIPELINE_AXIS]:
            parameter = read(model, name).detach()
            whole = (to_global(parameter) if isinstance(parameter, DTensor) else parameter).contiguous()
        group = self._group("sums", range(self.mesh.axis_size(PIPELINE_AXIS)))
        source = self.mesh.rank_at(**{**self._at, PIPELINE_AXIS: first})
        words = ("" if whole is None else str(whole.dtype)).ljust(_WORDS).encode()  # other stages may have other dtypes
        told = torch.tensor(list(words), dtype=torch.uint8, device=device)
        dist.broadcast(told, source, group=group)
        if whole is None:
            dtype = getattr(torch, bytes(told.tolist()).decode().strip().removeprefix("torch."))
            whole = torch.empty(self.parameters[name].shape, dtype=dtype, device=device)
        dist.broadcast(whole, source, group=group)
        return whole

    def sum_over_stages(self, number: Tensor) -> Tensor:
        """The sum over "pp", on every rank, of numbers of any dtypes: each rank gets it in that of its own.

        Communication: an all-reduce of a number of float64, as no stage knows the dtype of a loss that another one computes.
        """
        group, total = self._group("sums", range(self.mesh.axis_size(PIPELINE_AXIS))), number.double()
        wait_for(dist.all_reduce(total, group=group, async_op=True))
        return total.to(number.dtype)

    def finish_sends(self) -> None:
        """Waits until all that was sent to other stages has been received."""
        for channel in self._channels.values():
            channel.finish()

    def _group(self, purpose: str, coordinates: Iterable[int]) -> dist.ProcessGroup:
        ranks = [self.mesh.rank_at(**{**self._at, PIPELINE_AXIS: each}) for each in coordinates]
        return group_for(f"pipeline {purpose}", tuple(sorted(ranks)), (PIPELINE_AXIS,))

    def channel(self, way: str, stage: int, device: torch.device) -> Channel | Handover:
        """What brings activations ("F") into a stage, or their gradients ("B"). Made when first asked for, all in one order."""
        if not self._channels:
            here = self._at[PIPELINE_AXIS]
            stage_mesh = self.stage_mesh
            for later in range(1, self.schedule.num_stages):
                ends = self.schedule.rank_of(later - 1), self.schedule.rank_of(later)
                for each, into in (("F", later), ("B", later - 1)):
                    if ends == (here, here):
                        self._channels[each, into] = Handover()
                    elif here in ends:
                        first, second = (self.mesh.rank_at(**{**self._at, PIPELINE_AXIS: end}) for end in ends)
                        name = f"{each} into stage {into}"
                        self._channels[each, into] = Channel(
                            name, (first, second), this_rank(), stage_mesh, device, self.forms.get((each, into), {})
                        )
        return self._channels[way, stage]


class _Held(NamedTuple):
    """What is held of a microbatch on a stage until backward, beside what autograd keeps.

    given: where the gradients of what the stage gave go; the values are the next stage's. ones: gradients of the loss, on the last.
    """

    received: list[Tensor]
    given: list[GradientEdge]
    ones: list[Tensor] | None


class _Run:
    """One step: what is held of it, and how each action is taken."""

    def __init__(
        self,
        pipeline: Pipeline,
        model: nn.Module,
        microbatches: Sequence[Microbatch],
        loss_of: LossOf | None,
        computing: Within = nullcontext,
    ) -> None:
        self._pipeline, self._model, self._microbatches, self._loss_of = pipeline, model, microbatches, loss_of
        self._kinds = [each.kind for each in microbatches]
        self._computing = computing
        self._last = pipeline.schedule.num_stages - 1
        self._recording: Within = weights_may_wait if pipeline.schedule.splits_backward else nullcontext
        self._device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self._taken: dict[tuple[str, int], int] = {}
        self._held: dict[tuple[int, int], _Held] = {}
        self._later: dict[tuple[int, int], Later] = {}  # what adds up gradients of weights, between I and W
        self.most_held = 0
        self.ran: list[Action] = []
        self.outputs: list[Any] = []

    def take(self, action: Action) -> None:
        if action.kind == "F":
            self._forward(action)
        else:
            self._backward(action)
        self.most_held = max(self.most_held, len(self._held))
        self.ran.append(action)

    def finish(self) -> None:
        assert not self._held, "a schedule takes every microbatch back"
        self._pipeline.finish_sends()

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, self._microbatches[action.microbatch]
        received = self._receive("F", action) if stage else None
        with self._computing(), self._recording():
            given = self._pipeline.stages.forward(self._model, stage, received, microbatch.args, microbatch.kwargs)
        if stage < self._last:
            self._pipeline.channel("F", stage + 1, self._device).send(given, self._kinds[action.microbatch])
        elif self._loss_of is None:
            self.outputs.append(given)
        else:
            given = self._loss_of(given, microbatch)
        if self._loss_of is not None:
            self._held[stage, action.microbatch] = _Held(
                differentiable(received),
                [get_gradient_edge(x) for x in differentiable(given)],
                [first_gradient(x) for x in differentiable(given)] if stage == self._last else None,
            )

    def _backward(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        if action.kind == "W":
            for add in self._later.pop(key):
                add()
        else:
            received, given, ones = self._held[key]
            arrived = self._receive("B", action) if ones is None else ones
            waiting: AbstractContextManager[Later] = waiting_weights() if action.kind == "I" else nullcontext([])
            with waiting as later:
                go_back(given, arrived)
            self._send_back(action, [x.grad for x in received])
            if action.kind == "I":
                self._later[key] = later
        if action.kind != "I":
            del self._held[key]

    def _send_back(self, action: Action, gradients: list[Any]) -> None:
        if action.stage:
            channel = self._pipeline.channel("B", action.stage - 1, self._device)
            channel.send(gradients, self._kinds[action.microbatch])

    def _receive(self, way: str, action: Action) -> Any:
        taken = self._taken[way, action.stage] = self._taken.get((way, action.stage), 0) + 1
        kind, more = self._kinds[action.microbatch], taken < len(self._microbatches)
        return self._pipeline.channel(way, action.stage, self._device).receive(kind, more)


def go_back(given: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None]) -> None:
    """Backward from what a stage gave, but for what has no gradient; where nothing has one there is none."""
    pairs = [(x, gradient) for x, gradient in zip(given, gradients, strict=True) if gradient is not None]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])  # type: ignore[arg-type]


def differentiable(tree: Any) -> list[Tensor]:
    """The tensors of a tree that autograd follows."""
    return [x for x in tensors_of(tree) if x.requires_grad]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stage_mesh_of(mesh: ProcessMesh, coordinate: int) -> ProcessMesh:
    """The mesh of the stages at that coordinate on "pp"; of one process where there is no other axis."""
    if mesh.ndim == 1:
        return ProcessMesh([mesh.rank_at(**{PIPELINE_AXIS: coordinate})], ["dp"])
    return mesh.get_mesh_with_dim(PIPELINE_AXIS, coordinate)
