"""AdamW, its schedule, and the norm of a sharded gradient."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.mesh import Shard
from weft.reshard import layout_of
from weft.reshard.running.groups import group_over, this_rank

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

    Each shard is counted on one of the ranks that hold it. Non-finite gradients are left as they are. The host waits for
    no device.
    Communication: one all-reduce of a number over the mesh of the parameters, where the model is parallel.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    counted = [g for p, g in zip(parameters, gradients, strict=True) if g is not None and _is_first_holder(p)]
    total = torch.zeros((), device=next(model.parameters()).device)
    if counted:
        total = torch.stack(torch._foreach_norm(counted)).square().sum()
    parallel = next((parameter for parameter in parameters if isinstance(parameter, DTensor)), None)
    if parallel is not None and this_rank() in (mesh := layout_of(parallel).mesh):
        dist.all_reduce(total, group=group_over(parallel.device_mesh, mesh.axis_names))
    norm = total.sqrt()
    scale = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1), 1)
    torch._foreach_mul_([g for g in gradients if g is not None], scale)
    return norm


def _is_first_holder(parameter: Tensor) -> bool:
    """True on the one rank, of those that hold the same shard, that counts it."""
    if not isinstance(parameter, DTensor):
        return True
    layout = layout_of(parameter)
    coordinate = layout.mesh.coordinate(this_rank()) or {}
    return not any(index for axis, index in coordinate.items() if not isinstance(layout[axis], Shard))
