"""Refuses the steps of torch's optimizers that round a two-byte element by its place in a shard, under `exact`.

On a CPU, torch's `add(alpha=...)` of bfloat16 or float16 rounds once in a vector, and twice in the last elements of a
tensor. Which elements are last depends on how the mesh cuts the tensor. float32 and float64 elements round once.
"""

from __future__ import annotations

from typing import Any

from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop

from ..world.exact import marked_axes

_BY_ADD = (ASGD, SGD, Adadelta, Adagrad, Adamax, RMSprop)  # add a scaled tensor
_BY_ADD_OF_DECAY = (Adam, NAdam, RAdam)  # add the scaled weight where the decay is not decoupled


def check_exact_step(optimizer: Optimizer) -> None:
    """Raise ValueError before a step whose two-byte elements on a CPU would have other bits on another mesh."""
    if not isinstance(optimizer, (*_BY_ADD, *_BY_ADD_OF_DECAY)):
        return
    for group in optimizer.param_groups:
        if _rounds_alike(optimizer, group):
            continue
        for parameter in group["params"]:
            if parameter.itemsize != 2 or parameter.device.type != "cpu":
                continue
            axes = marked_axes((parameter,))
            if axes is not None:
                named, dtype = ",".join(f"{axis}={size}" for axis, size in axes.items()), str(parameter.dtype)[6:]
                raise ValueError(
                    f"exact {named} cannot be kept by {type(optimizer).__name__} with {dtype} parameters: on a CPU "
                    f"torch rounds their last elements in another way, and each mesh cuts elsewhere; keep float32 "
                    f"parameters, under torch.autocast for products in {dtype}, or take AdamW"
                )


def _rounds_alike(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a group's step rounds all elements alike: a fused step, or a step that adds no scaled tensor."""
    if isinstance(optimizer, _BY_ADD):
        return False
    return bool(group.get("fused") or group.get("decoupled_weight_decay") or not group["weight_decay"])
