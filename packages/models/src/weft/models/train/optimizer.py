"""Optimizers of torch by name. Called by `Trainer` and `weft explain`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .config import OptimizerConfig


@dataclass(frozen=True, slots=True)
class _Kind:
    """How to make an elementwise optimizer of torch.

    Elementwise: updating a shard gives the same values as updating the whole tensor.
    """

    make: Callable[..., torch.optim.Optimizer]
    options: Callable[[OptimizerConfig], dict[str, Any]]  # keyword arguments besides lr and weight_decay
    fused: bool = False  # whether torch has a fused kernel, for `DTensor`s too


def _betas(config: OptimizerConfig) -> dict[str, Any]:
    return {"betas": (config.beta1, config.beta2)}


class _RpropOnShards(torch.optim.Rprop):
    """Rprop on the local tensors of `DTensor` parameters.

    torch's Rprop assigns through a boolean mask, which `DTensor` does not implement.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        is_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
        return is_complex


_KINDS = {
    "adamw": _Kind(torch.optim.AdamW, _betas, fused=True),
    "adam": _Kind(torch.optim.Adam, _betas, fused=True),
    "nadam": _Kind(torch.optim.NAdam, lambda config: {**_betas(config), "decoupled_weight_decay": True}),
    "radam": _Kind(torch.optim.RAdam, lambda config: {**_betas(config), "decoupled_weight_decay": True}),
    "adamax": _Kind(torch.optim.Adamax, _betas),
    "adagrad": _Kind(torch.optim.Adagrad, lambda config: {}),
    "adadelta": _Kind(torch.optim.Adadelta, lambda config: {"rho": config.beta2}),
    "rmsprop": _Kind(torch.optim.RMSprop, lambda config: {"alpha": config.beta2, "momentum": config.beta1}),
    "rprop": _Kind(_RpropOnShards, lambda config: {}),
    "asgd": _Kind(torch.optim.ASGD, lambda config: {}),
    "sgd": _Kind(torch.optim.SGD, lambda config: {"momentum": config.beta1}),
}


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make the optimizer named by `config` over all parameters of the model; fused where torch has a fused kernel.

    Parameters of one dimension or less (norms, biases) get no weight decay.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    kind = _KINDS[config.name]
    return kind.make(groups, lr=config.lr, **kind.options(config), **({"fused": True} if kind.fused else {}))


def states_per_element(config: OptimizerConfig) -> int:
    """Count the optimizer's state values per element of a parameter.

    Counted on a real optimizer, after a step on a model of two weights.
    """
    with torch.device("cpu"):
        model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = make_optimizer(model, config)
    optimizer.step()
    states = optimizer.state[model.weight].values()
    return sum(isinstance(each, Tensor) and each.shape == model.weight.shape for each in states)
