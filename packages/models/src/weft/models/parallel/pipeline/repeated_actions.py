"""A pipeline's actions on shapes: few of the microbatches run, and the recorded collectives stand for all microbatches.

A module of Weft has the same state for all microbatches of equal shapes: parameters and shapes alone decide its calls.
So a stage's forward issues the same collectives for each microbatch, and so does a stage's backward. The messages
between stages are not copied: every microbatch sends and receives, in the schedule's order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from weft.reshard.extension import Recorded

from ...schedules.schedule import Action

FIRST = 0  # the microbatch whose gradients are new; later microbatches add to these
_OWN = ("weft.", "torch.nn.")  # packages whose modules have the same state for all microbatches


class RepeatsDiffer(Exception):
    """A microbatch's collectives differ from the second microbatch's, or cannot be copied."""


@dataclass(slots=True)
class RepeatedActions:
    """Runs the actions of a step's first, second and last microbatch; copies the second's for all between.

    recorded: the recording of the actions that run; the copies are added there.
    The last microbatch's collectives are compared with the second's, as a sample of the microbatches between.
    """

    recorded: Recorded
    _found: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)  # of the second microbatch
    _copied: set[tuple[int, int]] = field(default_factory=set)  # stages and microbatches whose forward did not run

    def run(self, action: Action, kind: Any, count: int, work: Callable[[], Any]) -> Any:
        """The result of `work` for this microbatch; for a copied action, the second microbatch's result.

        work: the action without messages. kind: `Microbatch.kind`. count: the number of microbatches in the step.
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
    """Whether microbatches of equal shapes issue the same collectives: model and criterion are Weft's own.

    A hook, or a forward of foreign code, may count calls; such a model runs for every microbatch.
    model: not laid out yet.
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
