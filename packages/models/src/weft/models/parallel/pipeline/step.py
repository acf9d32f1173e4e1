"""A step of a pipeline on one rank: carries out actions, and holds microbatches between forward and backward.

On shapes, a step is recorded faster by `RepeatedActions`: a few microbatches run, and their collectives are copied for
the rest. In modules of Weft, parameters and shapes alone decide which collectives a call issues. A stage's forward
therefore issues equal collectives for all microbatches of equal shapes, and so does a stage's backward. Messages
between stages are not copied: every microbatch sends and receives, in the schedule's order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from weft.kernels.extension import DelayedGradients, allow_delayed_weight_gradients, delay_weight_gradients
from weft.reshard.extension import Recorded, differentiable, tensors_of, world

from ...losses import first_gradient
from ...schedules.schedule import Action, Schedule
from .failures import Failure, Failures
from .messages import NOT_SENT, Channel, Handover, gradient_edge
from .stages import Stages

FIRST = 0  # the microbatch whose gradients are new; later microbatches add to these
_OWN = ("weft.", "torch.nn.")  # packages whose modules issue equal collectives for equal shapes


class RepeatsDiffer(Exception):
    """A microbatch's collectives differ from the second microbatch's, or cannot be copied. All microbatches must
    run.
    """


@dataclass(slots=True)
class RepeatedActions:
    """Runs the actions of a step's first, second and last microbatch; copies the second's for the microbatches between.

    Made by `run_on_shapes` for a step, and called by the pipeline.
    The last microbatch's collectives are compared with the second's, as a check of the copies.
    recorded: the recording of the step, where the copies are added.
    """

    recorded: Recorded
    # {(kind of action, stage, kind of microbatch): (collectives, result)} of the second microbatch.
    _found: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)
    _copied: set[tuple[int, int]] = field(default_factory=set)  # (stage, microbatch) whose forward was copied

    def run(self, action: Action, kind: Any, count: int, work: Callable[[], Any]) -> Any:
        """Run or copy an action. Returns the result of `work`; for a copied action, the second microbatch's result.

        kind: `Microbatch.kind`. count: the number of microbatches in the step. work: runs the action, without messages.
        Raises RepeatsDiffer where the action's collectives cannot be copied, or differ from the second microbatch's.
        """
        key = action.kind, action.stage, kind
        place, is_last = (action.stage, action.microbatch), action.microbatch == count - 1
        if action.microbatch == FIRST:
            return work()
        if place in self._copied if action.kind != "F" else key in self._found and not is_last:
            if key not in self._found:
                raise RepeatsDiffer
            self._copied.add(place)
            calls, result = self._found[key]
            self.recorded.repeat(calls)
            return result
        start = self.recorded.mark()
        result = work()
        calls = self.recorded.calls_since(start)
        if calls is None:
            raise RepeatsDiffer
        if self._found.setdefault(key, (calls, result))[0] != calls:
            raise RepeatsDiffer
        return result


def can_repeat(model: nn.Module, criterion: Any) -> bool:
    """Whether microbatches of equal shapes issue equal collectives: true where model and criterion are Weft's own.

    A hook, or a forward of foreign code, may behave differently from call to call. model: not laid out yet.
    """
    return _is_own(criterion) and all(_is_own_module(each) for each in model.modules())


def _is_own_module(module: nn.Module) -> bool:
    kind = type(module)
    functions = (kind, kind.forward, vars(module).get("forward", kind.forward))
    return not (module._forward_hooks or module._forward_pre_hooks) and all(map(_is_own, functions))


def _is_own(function: Any) -> bool:
    """Whether a class, a function or a criterion is Weft's or torch's, and so is the criterion in its attribute."""
    if function is None:
        return True
    if isinstance(function, partial):
        return _is_own(function.func)
    inner = getattr(function, "criterion", None)  # of RouterLosses
    module = getattr(function, "__module__", None) or type(function).__module__
    return f"{module}.".startswith(_OWN) and _is_own(inner)


CallContext = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """A microbatch: the arguments of the model, and the targets of the loss."""

    args: tuple[Any, ...]  # of the model
    kwargs: dict[str, Any] = field(default_factory=dict)  # of the model
    targets: Any = None  # of the criterion

    @property
    def kind(self) -> Any:
        """Equal for microbatches whose tensors have the same shapes, with the same grad mode."""
        return tuple(tuple(each.shape) for each in tensors_of((self.args, self.kwargs))), torch.is_grad_enabled()


LossOf = Callable[[Any, Microbatch], Tensor]  # (the model's output, the microbatch) -> a scalar


class _Held(NamedTuple):
    """The data of a microbatch kept by a stage from forward to backward, besides autograd's saved tensors."""

    received: list[Tensor]  # the received activations requiring grad; backward sends their gradients back
    outputs: list[GradientEdge]  # where the gradients of the stage's outputs enter; the values went to the next stage
    first_gradients: list[Tensor] | None  # on the last stage, the gradients of the loss: ones; None on earlier stages


class RunningStep:
    """A step of a pipeline on this rank. Made by `Pipeline`, which calls `perform` for each action, and then `finish`.

    After the first error of an action's work, further actions do no work: they take messages, and send zeros.
    """

    def __init__(
        self,
        model: nn.Module,
        microbatches: Sequence[Microbatch],
        loss_of: LossOf,
        *,
        schedule: Schedule,
        stages: Stages,
        failures: Failures,
        channel: Callable[[str, int, torch.device], Channel | Handover],
        call_context: CallContext = nullcontext,
        is_training: bool,
    ) -> None:
        """channel: as `Pipeline.channel`. is_training: whether backward follows. Otherwise `losses` has what `loss_of`
        returned.
        """
        self._model, self._microbatches, self._loss_of = model, microbatches, loss_of
        self._stages, self._failures, self._find_channel = stages, failures, channel
        self._is_training = is_training
        self._kinds = [each.kind for each in microbatches]
        self._has_one_kind = all(kind == self._kinds[0] for kind in self._kinds)
        self._call_context = call_context
        self._last = schedule.num_stages - 1
        self._recording: CallContext = allow_delayed_weight_gradients if schedule.splits_backward else nullcontext
        self._device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self._num_received: dict[tuple[str, int], int] = {}  # by direction and stage
        self._held: dict[tuple[int, int], _Held] = {}  # by stage and microbatch
        # By stage and microbatch: gradients of weights to compute in W.
        self._later: dict[tuple[int, int], DelayedGradients] = {}
        self._failure: Failure | None = None  # the first of this rank
        self.repeated: RepeatedActions | None = None
        self.most_held = 0
        self.ran: list[Action] = []
        self.losses: list[Tensor] = []  # on the last stage, unless backward follows

    def perform(self, action: Action) -> None:
        """Carries out an action: takes the message, computes, and sends the result to the neighboring stage."""
        if action.kind == "F":
            self._forward(action)
        else:
            self._backward(action)
        self.most_held = max(self.most_held, len(self._held))
        self.ran.append(action)

    def finish(self) -> Exception | None:
        """Waits until all ranks have come to the end of their actions.

        Returns the error to raise where the work of any rank failed. Communication and errors: as `Failures.meet`.
        """
        assert not self._held, "a schedule takes every microbatch back"
        return self._failures.meet(self._failure)

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, self._microbatches[action.microbatch]
        received = self._receive("F", action) if stage else None

        def work() -> Any:
            with self._call_context(), self._recording():
                output = self._stages.forward(self._model, stage, received, microbatch.args, microbatch.kwargs)
            return output if stage < self._last else self._loss_of(output, microbatch)

        output = self._attempt(action, lambda: self._run(action, work))
        if stage < self._last:
            self._send("F", stage + 1, action, output)
        elif not self._is_training:
            self.losses.append(output)
        if self._is_training and self._failure is None:
            ends = differentiable(output)
            self._held[stage, action.microbatch] = _Held(
                differentiable(received),
                [gradient_edge(x) for x in ends],
                [first_gradient(x) for x in ends] if stage == self._last else None,
            )

    def _backward(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        if action.kind == "W":
            self._attempt(action, lambda: self._run(action, lambda: [add() for add in self._later.pop(key)]))
        else:
            received_gradients: Any = self._receive("B", action) if action.stage < self._last else None
            delay: AbstractContextManager[DelayedGradients] = (
                delay_weight_gradients() if action.kind == "I" else nullcontext([])
            )

            def work() -> list[Any]:
                received, outputs, first_gradients = self._held[key]
                with delay as later:
                    run_backward(outputs, received_gradients if first_gradients is None else first_gradients)
                if action.kind == "I":
                    self._later[key] = later
                return [x.grad for x in received]

            gradients = self._attempt(action, lambda: self._run(action, work))
            if action.stage:
                self._send("B", action.stage - 1, action, gradients)
        if action.kind != "I":
            self._held.pop(key, None)

    def _run(self, action: Action, work: Callable[[], Any]) -> Any:
        """The result of an action's work, or of a recorded action under `RepeatedActions`."""
        if self.repeated is None:
            return work()
        return self.repeated.run(action, self._kinds[action.microbatch], len(self._microbatches), work)

    def _attempt(self, action: Action, part: Callable[[], Any]) -> Any:
        """The result of a part of an action; None after a failure.

        An error is this rank's failure. On shapes, where no other rank waits, the error is raised.
        """
        if self._failure is not None:
            return None
        try:
            return part()
        except Exception as error:
            if not world().peers_run:
                raise
            self._fail(Failure(action, error))
            return None

    def _fail(self, failure: Failure) -> None:
        self._failure = self._failure or failure
        self._held.clear()
        self._later.clear()

    def _send(self, direction: str, stage: int, action: Action, message: Any) -> None:
        """Send a message into a stage; after a failure, zeros or the word that no message comes."""
        kind, channel = self._kinds[action.microbatch], self._channel(direction, stage)
        self._attempt(action, lambda: channel.check(message, kind))
        if self._failure is None:
            channel.send(message, kind)
        else:
            channel.send_nothing(kind)

    def _receive(self, direction: str, action: Action) -> Any:
        """The next message into the action's stage. Without a message this rank fails, too."""
        number = self._num_received[direction, action.stage] = self._num_received.get((direction, action.stage), 0) + 1
        more = self._has_one_kind and number < len(self._microbatches)
        failure = self._failure
        seconds = None if failure is None else self._failures.patience
        try:
            message = self._channel(direction, action.stage).receive(self._kinds[action.microbatch], more, seconds)
        except RuntimeError as error:
            if failure is None:
                raise
            raise self._failures.give_up(failure) from error
        if message is NOT_SENT:
            self._fail(Failure(action))
        return message

    def _channel(self, direction: str, stage: int) -> Channel | Handover:
        return self._find_channel(direction, stage, self._device)


def run_backward(outputs: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None]) -> None:
    """Run backward from a stage's outputs with their gradients; an output whose gradient is None is left out."""
    pairs = [(x, gradient) for x, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])  # type: ignore[arg-type]
