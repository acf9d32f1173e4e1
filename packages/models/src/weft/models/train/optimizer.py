"""Optimizers by name, and their state values by parameter. Called by `Trainer` and `weft explain`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.reshard import Muon

from ..blocks import PROJECTIONS
from ..layers import embedding_tables
from ..parallel.parallelize import pipeline_of
from .config import OptimizerConfig, state_tensors


@dataclass(frozen=True, slots=True)
class _OptimizerKind:
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
    "adamw": _OptimizerKind(torch.optim.AdamW, _betas, fused=True),
    "adam": _OptimizerKind(torch.optim.Adam, _betas, fused=True),
    "nadam": _OptimizerKind(torch.optim.NAdam, lambda config: {**_betas(config), "decoupled_weight_decay": True}),
    "radam": _OptimizerKind(torch.optim.RAdam, lambda config: {**_betas(config), "decoupled_weight_decay": True}),
    "adamax": _OptimizerKind(torch.optim.Adamax, _betas),
    "adagrad": _OptimizerKind(torch.optim.Adagrad, lambda config: {}),
    "adadelta": _OptimizerKind(torch.optim.Adadelta, lambda config: {"rho": config.beta2}),
    "rmsprop": _OptimizerKind(torch.optim.RMSprop, lambda config: {"alpha": config.beta2, "momentum": config.beta1}),
    "rprop": _OptimizerKind(_RpropOnShards, lambda config: {}),
    "asgd": _OptimizerKind(torch.optim.ASGD, lambda config: {}),
    "sgd": _OptimizerKind(torch.optim.SGD, lambda config: {"momentum": config.beta1}),
}


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make the optimizer named by `config` over all parameters of the model; fused where torch has a fused kernel.

    Parameters of one dimension or less (norms, biases) get no weight decay.
    Raises ValueError under muon for a model without matrices in blocks.
    """
    parameters = list(model.parameters())
    if config.name == "muon":
        return _make_muon(model, config)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    kind = _KINDS[config.name]
    return kind.make(groups, lr=config.lr, **kind.options(config), **({"fused": True} if kind.fused else {}))


def _make_muon(model: nn.Module, config: OptimizerConfig) -> Muon:
    """Muon for the matrices of blocks, and AdamW for all other parameters."""
    matrices = find_matrices(model)
    if pipeline_of(model) is None:  # a stage may have none
        check_matrices(model)
    by_rows: dict[int | None, list[nn.Parameter]] = {None: []}
    for parameter, head_rows in matrices.items():
        by_rows.setdefault(head_rows if config.muon.split_heads else None, []).append(parameter)
    by_adamw = [parameter for parameter in model.parameters() if parameter not in matrices]
    decaying = {"weight_decay": config.weight_decay}
    return Muon(
        [
            *({"params": each, "rows": rows, **decaying} for rows, each in by_rows.items()),
            {"params": [p for p in by_adamw if p.ndim > 1], "adamw": True, **decaying},
            {"params": [p for p in by_adamw if p.ndim <= 1], "adamw": True, "weight_decay": 0.0},
        ],
        lr=config.lr,
        momentum=config.muon.momentum,
        nesterov=config.muon.nesterov,
        ns_steps=config.muon.ns_steps,
        betas=(config.beta1, config.beta2),
    )


def find_matrices(model: nn.Module) -> dict[nn.Parameter, int | None]:
    """The matrices updated by Muon, each with the number of rows of a head for queries and keys, else with None.

    These are the parameters of two or three dims in blocks, the modules in the outermost nn.ModuleList, without
    embedding tables. A parameter of three dims is a stack of matrices.
    """
    tables = embedding_tables(model)
    found: dict[nn.Parameter, int | None] = {}

    def visit(name: str, module: nn.Module, in_block: bool) -> None:
        head_rows = getattr(module, "unit", None) if name in PROJECTIONS[:2] else None
        for parameter in module.parameters(recurse=False):
            if in_block and parameter.ndim in (2, 3) and parameter not in tables:
                found[parameter] = head_rows
        for child_name, child in module.named_children():
            visit(child_name, child, in_block or isinstance(module, nn.ModuleList))

    visit("", model, False)
    return found


def check_matrices(model: nn.Module) -> None:
    """Raises ValueError for a model without matrices in blocks, which Muon needs."""
    if not find_matrices(model):
        raise ValueError(
            f"optimizer.name is muon, which orthogonalizes the matrices of blocks, and {type(model).__name__} has "
            f"none: no module in an nn.ModuleList has a weight of two dims; put the blocks into an nn.ModuleList, or "
            f"give --optimizer.name adamw"
        )


def communicate_update(model: nn.Module, config: OptimizerConfig) -> None:
    """Run the part of an optimizer's step that communicates, on a model with gradients, without data.

    Communication: as Muon's `update_matrices`, under muon; none for other optimizers.
    """
    if config.name == "muon":
        _make_muon(model, config).update_matrices()


def count_states(model: nn.Module, config: OptimizerConfig) -> dict[str, int]:
    """Parameter name -> the optimizer's state values per element. Raises ValueError as `make_optimizer`."""
    if config.name == "muon":
        check_matrices(model)
    matrices = find_matrices(model)
    counts = {in_block: state_tensors(config, in_block=in_block) for in_block in (True, False)}
    return {name: counts[parameter in matrices] for name, parameter in model.named_parameters()}
