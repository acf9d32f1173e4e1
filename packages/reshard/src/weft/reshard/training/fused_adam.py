"""Runs torch's fused Adam on DTensors by a single call on each rank's local tensors.

An element's update needs no other element. Importing this file registers `_step` for torch's fused Adam ops on
DTensors. torch's own rules infer the layouts of all tensors of an optimizer in each step, which on a CPU takes several
times as long as the step.

torch's CPU kernel computes elements in vectors, except the last elements of a tensor. The last elements are rounded
differently: the code for vectors uses fused multiply-add, the code for single elements does not. Inside `exact_sums`,
and for parameters of a plan with `exact`, the last elements are padded to whole vectors: an element then has the same
bits in a shard of any length.
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
from ..world.exact import marked_axes

# Elements. A vector of torch's kernel has at most 64 bytes: 8 float64, 16 float32 or 32 two-byte elements. 32 is a
# multiple of each.
VECTOR = 32


def _step(cls: type, step: Any, types: Sequence[type], args: tuple[list[Tensor], ...], kwargs: dict[str, Any]) -> None:
    """The implementation of torch's fused Adam ops for DTensors.

    args: parameters, gradients, each list of states, and the step numbers, as in torch's optimizers.
    Communication: none, except to reshard a gradient whose layout is not the parameter's; torch would redistribute.
    Raises LayoutError for a state whose layout is not the parameter's.
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
    arguments = {name: _local(value) for name, value in kwargs.items()}
    if marked_axes(parameters) is not None and all(each.device.type == "cpu" for each in locals_[0]):
        _step_in_vectors(step, locals_, arguments)
    else:
        step(*locals_, **arguments)


def _step_in_vectors(step: Any, lists: list[list[Tensor]], arguments: dict[str, Any]) -> None:
    """`step(*lists, **arguments)`, with each element computed in a vector. For the lists, see `_step`."""
    *tensors, steps = lists
    vectors: list[list[Tensor]] = [[] for _ in tensors]
    step_of_each: list[Tensor] = []
    padded: list[tuple[Tensor, Tensor]] = []  # elements of a tensor, and their copy, to be copied back
    used = [position for position, each in enumerate(tensors) if each]  # the list of an optional state may be empty

    def add(parts: Sequence[Tensor], step_number: Tensor) -> None:
        for position, part in zip(used, parts, strict=True):
            vectors[position].append(part)
        step_of_each.append(step_number)

    for step_number, *parts in zip(steps, *(tensors[position] for position in used), strict=True):
        n = parts[0].numel()
        n_in_vectors = n - n % VECTOR if all(each.is_contiguous() for each in parts) else 0
        if n_in_vectors == n:
            add(parts, step_number)
        elif n_in_vectors:
            add([each.view(-1)[:n_in_vectors] for each in parts], step_number)
        if n_in_vectors < n:
            sources = [each.view(-1)[n_in_vectors:] if n_in_vectors else each for each in parts]
            copies = [each.new_zeros(-(-each.numel() // VECTOR) * VECTOR) for each in sources]
            for source, copy in zip(sources, copies, strict=True):
                padded.append((source, copy[: source.numel()].view(source.shape).copy_(source)))
            add(copies, step_number)
    if step_of_each:
        step(*vectors, step_of_each, **arguments)
    for source, copy in padded:
        source.copy_(copy)


def _same_layout(tensor: Tensor, parameter: Tensor) -> bool:
    if isinstance(tensor, DTensor) and isinstance(parameter, DTensor):
        if dtensor_spec(tensor) is dtensor_spec(parameter):
            return True
        return tensor.placements == parameter.placements and tensor.device_mesh == parameter.device_mesh
    return isinstance(tensor, DTensor) == isinstance(parameter, DTensor)


def reshard_to_layout_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, in the parameter's layout. Communication: a reshard, where the layouts differ.

    Raises LayoutError if one is a DTensor and the other a plain tensor.
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
