"""The learning rate of each step of a run, for `Trainer.step`."""

from __future__ import annotations

import math

from .config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of step `step` (from 0) of `steps`: linear warmup, then `config.schedule`.

    cosine: half a cosine down to `final_share` of the peak (Loshchilov & Hutter, 2017).
    linear: a line down to `final_share`.
    constant: the peak throughout.
    wsd: the peak, then a line down to `final_share` over the last `decay_steps` (Hu et al., "MiniCPM", 2024).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    first, last = config.warmup_steps, config.final_share
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        first = max(first, steps - (steps // 5 if config.decay_steps is None else config.decay_steps))
    progress = min(1.0, max(0.0, (step - first) / max(1, steps - first)))
    above = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.lr * (last + (1 - last) * above)


def unfinished_warmup(config: OptimizerConfig, steps: int) -> list[str]:
    """A line of warning for a run shorter than the warmup; otherwise an empty list."""
    if config.warmup_steps <= steps:
        return []
    return [
        f"optimizer.warmup_steps is {config.warmup_steps}, above steps {steps}: the learning rate reaches "
        f"{learning_rate(config, steps - 1, steps):.2g} of {config.lr:.2g}"
    ]
