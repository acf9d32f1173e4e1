"""Initial values of parameters, as a function of (seed, parameter name, element): the same on every mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels.extension import normal_
from weft.mesh import derive_key
from weft.reshard import layout_of


@dataclass(frozen=True, slots=True)
class Constant:
    """Every element is `value`."""

    value: float


@dataclass(frozen=True, slots=True)
class Normal:
    """Elements are normal with mean 0 and standard deviation `std`."""

    std: float


Initial = Constant | Normal


def initialize(model: nn.Module, seed: int) -> None:
    """Fills every parameter in place with `model.initial_value(name)`.

    Each rank draws only the local part, with a few MB of scratch memory. The values do not depend on the mesh, the
    plan, or the order in which parameters were made. A tied weight is drawn once, under the weight's first name.
    Raises ValueError for a parameter on the meta device.
    """
    for name, parameter in model.named_parameters():
        fill(name, parameter, model.initial_value(name), seed)  # type: ignore[operator]


@torch.no_grad()
def fill(name: str, parameter: Tensor, initial: Initial, seed: int) -> None:
    """Fills a parameter in place. name: of the parameter in the model. Raises ValueError for a parameter on `meta`."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.is_meta:
        raise ValueError(f"parameter {name} is on the meta device; call model.to_empty(device=...) before initialize")
    match initial:
        case Constant(value=value):
            local.fill_(value)
        case Normal(std=std):
            normal_(parameter, derive_key(seed, "initialize", name), std=std)


def local_slices(parameter: Tensor) -> tuple[slice, ...]:
    """This rank's slice of the global tensor, as a slice for each dim."""
    if isinstance(parameter, DTensor):
        return layout_of(parameter).local_slices(parameter.shape, torch.distributed.get_rank())
    return tuple(slice(0, size) for size in parameter.shape)
