"""The metrics of a step beside the loss: of routers, of preferences; and the steps with results still on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import MixtureConfig, ModelConfig
from ..data.batches import Batches
from ..data.examples.example import Task
from ..data.examples.rows import ExampleBatches
from ..step.find_gradients import StepResult
from .report import PREFERENCE_METRICS, ROUTER_METRICS


@dataclass(frozen=True, slots=True)
class UnreadStep:
    """A step whose results are still on the device, until `Trainer.read_metrics` fetches the results of many steps."""

    step: int  # from 1, as in `Metrics`
    result: StepResult
    lr: float  # learning rate of the step


def router_metrics(steps: Sequence[UnreadStep]) -> list[dict[str, float]]:
    """For each step the values of ROUTER_METRICS by name; empty without experts. Waits for the device once."""
    rows = []
    for each in steps:
        parts = each.result.parts
        if parts is None:
            return [{} for _ in steps]
        busiest = (parts.load.amax(1) / parts.load.mean(1)).amax()
        rows.append(torch.stack([parts.balance, parts.z.sum(), busiest.to(parts.balance.dtype)]))
    return [dict(zip(ROUTER_METRICS, row, strict=True)) for row in torch.stack(rows).tolist()]


def preference_metrics(
    steps: Sequence[UnreadStep], task: Task, batches: Batches | ExampleBatches
) -> list[dict[str, float | None]]:
    """For each step the values of PREFERENCE_METRICS by name; empty but for dpo and kto. Waits for the device once.

    A step of kto in which all examples have the same label has None as the missing label's reward, and as the margin.
    """
    sums = [each.result.sums for each in steps]
    if any(each is None for each in sums):
        return [{} for _ in steps]
    rows = torch.stack([each for each in sums if each is not None]).tolist()
    if task == "dpo":
        return [dict(zip(PREFERENCE_METRICS[:4], row, strict=True)) for row in rows]
    assert isinstance(batches, ExampleBatches), "preferences are of examples"
    found: list[dict[str, float | None]] = []
    for each, (good, bad, kl) in zip(steps, rows, strict=True):
        counts = batches.counts(each.step - 1, slice(None))
        chosen = good if counts.desirable else None
        rejected = bad if counts.desirable < counts.examples else None
        margin = None if chosen is None or rejected is None else chosen - rejected
        found.append({"rewards_chosen": chosen, "rewards_rejected": rejected, "rewards_margin": margin, "kl": kl})
    return found


def sum_loads(steps: Sequence[UnreadStep]) -> Tensor | None:
    """The tokens given to each expert in these steps together, [layers with experts, E]; None without experts."""
    loads = [each.result.parts.load for each in steps if each.result.parts is not None]
    return torch.stack(loads).sum(0) if loads else None


def name_failing_router(result: StepResult, config: ModelConfig) -> str:
    """For the error about a NaN or infinite loss: text naming the first layer whose router is not finite, or ""."""
    if result.parts is None or not isinstance(config, MixtureConfig):
        return ""
    failing = [
        layer for layer, z in zip(config.sparse_layers, result.parts.z.isfinite().tolist(), strict=True) if not z
    ]
    if not failing:
        return ""
    return f"; the router of layer {failing[0]} is the first whose logits are not finite"
