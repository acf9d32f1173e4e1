"""The actions of a pipeline on shapes: of microbatches that are alike few run, and their collectives stand for all.

A stage's forward, and a stage's backward, issue for each microbatch the same collectives, because modules of Weft have
no state that differs between microbatches of equal shapes: the modules' calls follow from parameters and shapes alone.
The messages between stages are not repeated: every microbatch sends and receives its own, in the schedule's order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from weft.reshard.extension import Recorded

from ...schedules.schedule import Action

FIRST = 0  # the microbatch that makes gradients, to which later ones add
_OWN = ("weft.", "torch.nn.")  # packages whose modules have no state that differs between microbatches


class RepeatsDiffer(Exception):
    """A microbatch issued other collectives than the one that stands for it, or collectives that cannot be repeated."""


@dataclass(slots=True)
class RepeatedActions:
    """Runs the actions of a step's first, second and last microbatch; of the others, copies those of the second.

    recorded: the recording in which the actions run, to which the copies are added.
    The last microbatch runs, and its collectives are compared with the second's: a sample of what the copies assume.
    """

    recorded: Recorded
    _found: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)  # of the second microbatch
    _copied: set[tuple[int, int]] = field(default_factory=set)  # stages and microbatches whose forward did not run

    def run(self, action: Action, kind: Any, count: int, work: Callable[[], Any]) -> Any:
        """What `work`, the action without its messages, returns for this microbatch or for the one standing for it.

        kind: of the microbatch: `Microbatch.kind`. count: the microbatches of the step.
        Raises RepeatsDiffer where the collectives of the action cannot be repeated, or are not those of the second
        microbatch.
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

    A model with hooks, or with a forward of other code, may count its calls, and is run for every microbatch.
    model: not laid out yet.
    """
    return _is_own(criterion) and all(_is_own_module(each) for each in model.modules())


def _is_own_module(module: nn.Module) -> bool:
    kind = type(module)
    functions = (kind, kind.forward, vars(module).get("forward", kind.forward))
    return not (module._forward_hooks or module._forward_pre_hooks) and all(map(_is_own, functions))


def _is_own(function: Any) -> bool:
    """Whether a class, a function or a criterion is Weft's or torch's, with all that it calls by its attributes."""
    if function is None:
        return True
    if isinstance(function, partial):
        return _is_own(function.func)
    inner = getattr(function, "criterion", None)  # of RouterLosses
    module = getattr(function, "__module__", None) or type(function).__module__
    return f"{module}.".startswith(_OWN) and _is_own(inner)
