"""Runs a schedule on a cut model: the actions of this rank in their order, and messages between stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from weft.mesh import ProcessMesh
from weft.reshard.running.groups import this_rank

from .channels import Channel, Handover, tensors_of
from .schedule import Action, Schedule
from .stages import Stages

PIPELINE_AXIS = "pp"


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What the model is called with. kind: equal for microbatches of which all shapes are equal."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: Any


@dataclass(slots=True)
class _Held:
    """A microbatch on a stage between its forward and its backward."""

    received: Any
    given: Any


class Runner:
    """A cut model on this rank, its schedule, and its neighbors.

    mesh: with the axis "pp". Channels are made when it first runs, on all ranks in one order.
    """

    def __init__(self, model: nn.Module, stages: Stages, schedule: Schedule, mesh: ProcessMesh, device: torch.device) -> None:
        self._model, self._stages, self.schedule = model, stages, schedule
        self._mesh, self._device = mesh, device
        self._channels: dict[tuple[str, int], Channel | Handover] | None = None
        self.ran: list[Action] = []  # by the last run

    def forward_backward(
        self,
        microbatches: Sequence[Microbatch],
        loss_of: Callable[[int, Any], Tensor],
        accumulating: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[Tensor]:
        """Takes each microbatch forward and backward; the losses, on the ranks of the last stage, else none.

        loss_of: of a microbatch's number and the model's output, a scalar. accumulating: in it backward passes add up.
        """
        schedule = self.schedule
        if len(microbatches) != schedule.microbatches:
            schedule = replace_microbatches(schedule, len(microbatches))
        held: dict[tuple[int, int], _Held] = {}
        losses: list[Tensor] = []
        self.ran = []
        actions = schedule.actions[self._coordinate()]
        for action in actions:
            kind = microbatches[action.microbatch].kind
            if action.kind == "F":
                held[action.stage, action.microbatch] = self._forward(action, microbatches, loss_of, losses)
            else:
                with accumulating():
                    self._backward(action, held, kind, len(microbatches))
            self.ran.append(action)
        self._finish()
        return losses

    def forward(self, microbatches: Sequence[Microbatch]) -> list[Any]:
        """Takes each microbatch forward alone; what the model gave for each, on the ranks of the last stage, else none."""
        outputs: list[Any] = []
        for stage in self._stages.own if self._single() else self._stages.own:
            for number in range(len(microbatches)):
                action = Action("F", stage, number)
                given = self._run_stage(action, microbatches)[1]
                if stage == self.schedule.num_stages - 1:
                    outputs.append(given)
        self._finish()
        return outputs
