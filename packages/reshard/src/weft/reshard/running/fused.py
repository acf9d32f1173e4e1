"""Fused steps of Adam on DTensors: an element is updated by itself, so each rank's parts are, in one call.

torch asks its rules how such a step lies for all tensors of an optimizer in each step, which takes a CPU several times as long as the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import LayoutError

from .dtensor import layout_of, memory_of


def _step(cls: type, step: Any, types: Sequence[type], args: tuple[list[Tensor], ...], kwargs: dict[str, Any]) -> None:
    """args: parameters, gradients, the states of each, and their numbers of steps, as torch's optimizers give them.

    Raises LayoutError for a gradient, or a state, that lies otherwise than its parameter.
    """
    parameters, *of_each, steps = args
    for name, tensors in zip(("gradient", "state", "state", "state"), of_each, strict=True):
        for parameter, tensor in zip(parameters, tensors, strict=False):  # a state that is not asked for has none
            _check(name, parameter, tensor)
    locals_ = [[_local(each) for each in tensors] for tensors in (parameters, *of_each, steps)]
    step(*locals_, **{name: _local(value) for name, value in kwargs.items()})


def _check(name: str, parameter: Tensor, tensor: Tensor) -> None:
    if isinstance(parameter, DTensor) and isinstance(tensor, DTensor):
        if tensor.placements == parameter.placements and tensor.device_mesh == parameter.device_mesh:
            return
    elif not isinstance(parameter, DTensor) and not isinstance(tensor, DTensor):
        return
    lies = [f"({layout_of(each)})" if isinstance(each, DTensor) else "a plain tensor" for each in (tensor, parameter)]
    raise LayoutError(
        f"the {name} of a parameter of shape {tuple(parameter.shape)} is {lies[0]}, the parameter {lies[1]}: reshard one to "
        f"the layout of the other before the optimizer's step"
    )


def _local(value: Any) -> Any:
    return memory_of(value) if isinstance(value, DTensor) else value


# For every DTensor of this process, whoever made it: torch has one place for an operator of a subclass.
for _op in (torch.ops.aten._fused_adamw_, torch.ops.aten._fused_adam_):
    for _overload in (_op.default, _op.tensor_lr):
        torch.library.register_torch_dispatch(_overload, DTensor, _step)
