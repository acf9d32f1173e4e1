"""Fused Adam steps on DTensors, on each rank's local tensors in a single call: Adam updates each element by itself.

Importing this file registers the steps. torch's own rules infer the layouts of all tensors of an optimizer in each
step, which on a CPU takes several times as long as the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import LayoutError

from ..moving.dtensor import dtensor_spec, layout_of, memory_of
from ..moving.reshard import reshard


def _step(cls: type, step: Any, types: Sequence[type], args: tuple[list[Tensor], ...], kwargs: dict[str, Any]) -> None:
    """The implementation of torch's fused Adam ops for DTensors.

    args: parameters, gradients, each list of states, and the step numbers, as in torch's optimizers.
    Communication: none, except to reshard a gradient in another layout than its parameter's; torch would redistribute
    it.
    Raises LayoutError for a state in another layout than its parameter's.
    """
    parameters, gradients, *states, steps = args
    gradients = [
        reshard_to_layout_of(parameter, gradient) for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    for state in states:
        for parameter, tensor in zip(parameters, state, strict=False):  # an optional state may be an empty list
            if not _same_layout(tensor, parameter):
                raise LayoutError(
                    f"an optimizer state of a parameter of shape {tuple(parameter.shape)} is {_describe(tensor)}, and "
                    f"the parameter is {_describe(parameter)}; reshard the state to the parameter's layout before the "
                    f"step"
                )
    locals_ = [[_local(each) for each in tensors] for tensors in (parameters, gradients, *states, steps)]
    step(*locals_, **{name: _local(value) for name, value in kwargs.items()})


def _same_layout(tensor: Tensor, parameter: Tensor) -> bool:
    if isinstance(tensor, DTensor) and isinstance(parameter, DTensor):
        if dtensor_spec(tensor) is dtensor_spec(parameter):
            return True
        return tensor.placements == parameter.placements and tensor.device_mesh == parameter.device_mesh
    return isinstance(tensor, DTensor) == isinstance(parameter, DTensor)


def reshard_to_layout_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, in the parameter's layout. Communication: a reshard, where the layouts differ.

    Raises LayoutError where one of the two is a DTensor, and the other a plain tensor.
    """
    if _same_layout(gradient, parameter):
        return gradient
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return reshard(gradient, placements=layout_of(parameter))
    raise LayoutError(
        f"the gradient of a parameter of shape {tuple(parameter.shape)} is {_describe(gradient)}, and the parameter "
        f"is {_describe(parameter)}; give both a layout with distribute(), or neither"
    )


def _describe(tensor: Tensor) -> str:
    return f"({layout_of(tensor)})" if isinstance(tensor, DTensor) else "a plain tensor"


def _local(value: Any) -> Any:
    return memory_of(value) if isinstance(value, DTensor) else value


# Applies to every DTensor of this process, also outside Weft: torch keeps one implementation of an op for a subclass.
for _op in (torch.ops.aten._fused_adamw_, torch.ops.aten._fused_adam_):
    for _overload in (_op.default, _op.tensor_lr):
        torch.library.register_torch_dispatch(_overload, DTensor, _step)
