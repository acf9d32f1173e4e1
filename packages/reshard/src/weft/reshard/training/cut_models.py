"""Models cut into pipeline stages, of which a rank holds some parameters: refuses calls that read all of a model's.

Without these refusals each stage would compute a result of its own, and the stages' parameters would drift apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from .hooks import before_step

_cut_models: weakref.WeakSet[CutModel] = weakref.WeakSet()


class CutModel:
    """A model whose parameters lie on several ranks, as stages. Refusals last while the model's pipeline keeps this.

    Before the step of an optimizer with parameters of the model, torch's LBFGS is refused: it takes norms and dot
    products over all parameters, and searches along one line for all.
    """

    def __init__(self, model: nn.Module) -> None:
        # A weak reference to each parameter would keep torch from swapping tensors, as `to()` does.
        self._model = weakref.ref(model)
        _cut_models.add(self)
        before_step.add(self._before_step)

    def holds(self, parameters: Iterable[Tensor]) -> bool:
        """Whether any of `parameters` is the model's."""
        model = self._model()
        own = set() if model is None else {id(each) for each in model.parameters()}
        return any(id(each) in own for each in parameters)

    def _before_step(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, LBFGS) and self.holds(p for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__}.step() on parameters of a model cut into pipeline stages: the optimizer "
                f"takes norms and dot products over all parameters, and this rank holds those of its stages alone, so "
                f"each stage would search along a line of its own; take an optimizer that updates each element by "
                f"itself, such as AdamW, or a mesh without pp"
            )


def refuse_cut_models(parameters: Iterable[Tensor], call: str) -> None:
    """Raise ValueError where any of `parameters` is of a model cut into stages.

    call: the refused call, which reads the gradients of all parameters, as written in the user's program.
    """
    tensors = list(parameters)
    if any(each.holds(tensors) for each in _cut_models):
        raise ValueError(
            f"{call} without mesh= got parameters of a model cut into pipeline stages, of which this rank holds those "
            f"of its stages alone: each stage would get a norm of its own; call weft.models.clip_gradients(model, "
            f"max_norm), or give the mesh of all stages by mesh="
        )
