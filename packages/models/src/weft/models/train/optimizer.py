"""What updates the weights: an optimizer of torch by its name, and the clipping before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.reshard import clip_grad_norm_

from ..parallel.parallelize import pipeline_of
from .config import OptimizerConfig


@dataclass(frozen=True, slots=True)
class _Kind:
    """An optimizer of torch that works on each element by itself, so that a shard is updated as it would be in the whole.

    options: those of its own, beside the learning rate and the decay of weights. fused: whether torch has one kernel for it, of `DTensor`s too.
    """

    make: Callable[..., torch.optim.Optimizer]
    options: Callable[[OptimizerConfig], dict[str, Any]]
    fused: bool = False


def _betas(config: OptimizerConfig) -> dict[str, Any]:
    return {"betas": (config.beta1, config.beta2)}


class _RpropOnShards(torch.optim.Rprop):
    """It updates what each process holds as a plain tensor: it writes where a mask says, which torch has not for `DTensor`s."""

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
    """The optimizer that `config` names; fused where torch has it so for every parameter. Norms and biases have no weight decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    kind = _KINDS[config.name]
    return kind.make(groups, lr=config.lr, **kind.options(config), **({"fused": True} if kind.fused else {}))


def states_per_element(config: OptimizerConfig) -> int:
    """The numbers that the optimizer keeps for each element of a parameter: a step of it on a few says so."""
    with torch.device("cpu"):
        model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = make_optimizer(model, config)
    optimizer.step()
    kept = optimizer.state[model.weight].values()
    return sum(isinstance(each, Tensor) and each.shape == model.weight.shape for each in kept)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients so that their norm over the whole model is at most `max_norm`; returns the norm before, a scalar.

    max_norm: 0 scales nothing, as in Megatron, nanoGPT and transformers.
    The work is done by `clip_grad_norm_` of the parameters that learn; see there, for errors too. Where the model is cut into stages each rank gives those of its
    own, and what several stages have is counted on the first of them.
    """
    max_norm = max_norm or math.inf
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    pipeline = pipeline_of(model)
    if pipeline is None:
        return clip_grad_norm_(trained.values(), max_norm)
    copies = [parameter for name, parameter in trained.items() if not pipeline.is_counted_here(name)]
    return clip_grad_norm_(trained.values(), max_norm, mesh=pipeline.mesh, copies=copies)
