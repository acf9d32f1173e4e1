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

from .api import reshard
from .dtensor import kind_of, layout_of, memory_of


def _step(cls: type, step: Any, types: Sequence[type], args: tuple[list[Tensor], ...], kwargs: dict[str, Any]) -> None:
    """args: parameters, gradients, the states of each, and their numbers of steps, as torch's optimizers give them.

    Communication: none, but for a gradient that lies otherwise than its parameter: it is resharded, where torch redistributes it.
    Raises LayoutError for a state that does.
    """
    parameters, gradients, *states, steps = args
    pairs = zip(parameters, gradients, strict=True)
    gradients = [gradient if _lie_alike(gradient, p) else _brought(gradient, p) for p, gradient in pairs]
    for state in states:
        for parameter, tensor in zip(parameters, state, strict=False):  # one that is not asked for has none
            if not _lie_alike(tensor, parameter):
                raise LayoutError(
                    f"a state of the optimizer, of a parameter of shape {tuple(parameter.shape)}, is {_told(tensor)}, and the "
                    f"parameter {_told(parameter)}; reshard the state to the parameter's layout before the step"
                )
    locals_ = [[_local(each) for each in tensors] for tensors in (parameters, gradients, *states, steps)]
    step(*locals_, **{name: _local(value) for name, value in kwargs.items()})


def _lie_alike(tensor: Tensor, parameter: Tensor) -> bool:
    if isinstance(tensor, DTensor) and isinstance(parameter, DTensor):
        if kind_of(tensor) is kind_of(parameter):
            return True
        return tensor.placements == parameter.placements and tensor.device_mesh == parameter.device_mesh
    return isinstance(tensor, DTensor) == isinstance(parameter, DTensor)


def _brought(gradient: Tensor, parameter: Tensor) -> Tensor:
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return reshard(gradient, placements=layout_of(parameter))
    raise LayoutError(
        f"the gradient of a parameter of shape {tuple(parameter.shape)} is {_told(gradient)}, and the parameter "
        f"{_told(parameter)}; give both a layout with distribute(), or neither"
    )


def _told(tensor: Tensor) -> str:
    return f"({layout_of(tensor)})" if isinstance(tensor, DTensor) else "a plain tensor"


def _local(value: Any) -> Any:
    return memory_of(value) if isinstance(value, DTensor) else value


# For every DTensor of this process, whoever made it: torch has one place for an operator of a subclass.
for _op in (torch.ops.aten._fused_adamw_, torch.ops.aten._fused_adam_):
    for _overload in (_op.default, _op.tensor_lr):
        torch.library.register_torch_dispatch(_overload, DTensor, _step)
