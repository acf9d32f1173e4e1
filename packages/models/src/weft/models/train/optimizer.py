"""AdamW, its schedule, and the norm of a sharded gradient."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.mesh import Shard
from weft.mesh.refinement import parts_of_axes
from weft.reshard import layout_of
from weft.reshard.running.groups import group_of, group_over, this_rank

from ..parallel.parallelize import pipeline_of
from .config import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter, 2019), without weight decay on norms and biases."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Linear warmup, then a cosine to a tenth (Loshchilov & Hutter, 2017)."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    return config.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients so that their norm over the whole model is at most `max_norm`; returns it as it was, a scalar.

    Each shard is counted on one of the ranks that hold it; parameters may lie on several meshes. On ranks outside of these
    the norm is 0. Non-finite gradients are left as they are. The host waits for no device.
    Communication: one all-reduce of a number over the ranks that hold parameters, where the model is parallel; where it is cut
    into stages another over these.
    """
    pipeline = pipeline_of(model)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.grad is not None}
    parameters = list(named.values())
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    counted = [
        gradient
        for (name, parameter), gradient in zip(named.items(), gradients, strict=True)
        if gradient is not None and _is_first_holder(parameter) and (pipeline is None or pipeline.is_counted_here(name))
    ]
    total = torch.zeros((), device=next(model.parameters()).device)
    if counted:
        total = torch.stack(torch._foreach_norm(counted)).square().sum()
    group = _group_of(model)
    if group is not None:
        dist.all_reduce(total, group=group)
    if pipeline is not None:
        total = pipeline.sum_over_stages(total)
    norm = total.sqrt()
    scale = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1), 1)
    torch._foreach_mul_([g for g in gradients if g is not None], scale)
    return norm


def _group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that hold trained parameters, where this is one of them and the model is parallel."""
    on = {
        layout_of(parameter).mesh: parameter.device_mesh
        for parameter in model.parameters()
        if isinstance(parameter, DTensor) and parameter.requires_grad
    }
    if not on:
        return None
    first, *others = on
    if all(parts_of_axes(mesh, first) or parts_of_axes(first, mesh) for mesh in others):  # one set of ranks
        return group_over(on[first], first.axis_names) if this_rank() in first else None
    ranks = tuple(sorted({rank for mesh in on for rank in mesh}))
    return group_of(ranks) if this_rank() in ranks else None


def _is_first_holder(parameter: Tensor) -> bool:
    """True on the one rank, of those that hold the same shard, that counts it."""
    if not isinstance(parameter, DTensor):
        return True
    layout = layout_of(parameter)
    coordinate = layout.mesh.coordinate(this_rank()) or {}
    return not any(index for axis, index in coordinate.items() if not isinstance(layout[axis], Shard))
