"""AdamW and its schedule."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from weft.reshard import clip_grad_norm_

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

    It is `clip_grad_norm_` of the parameters that learn; see there. Where the model is cut into stages each rank gives those of its
    own, and what several stages have is counted on the first of them.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    pipeline = pipeline_of(model)
    if pipeline is None:
        return clip_grad_norm_(trained.values(), max_norm)
    copies = [parameter for name, parameter in trained.items() if not pipeline.is_counted_here(name)]
    return clip_grad_norm_(trained.values(), max_norm, mesh=pipeline.mesh, copies=copies)
