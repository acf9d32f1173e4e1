"""Records a pipeline's step on shapes faster: a few microbatches run, and their collectives are copied for the rest.

In modules of Weft, parameters and shapes alone decide which collectives a call issues. A stage's forward therefore
issues equal collectives for all microbatches of equal shapes, and so does a stage's backward. Messages between stages
are not copied: every microbatch sends and receives, in the schedule's order.
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
