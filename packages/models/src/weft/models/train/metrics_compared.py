"""The losses and norms of two runs, compared step by step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .metrics_file import METRICS, read_logged


@dataclass(frozen=True, slots=True)
class ComparedMetrics:
    """The comparison of two runs' losses and norms, over the steps of both."""

    steps: int  # of both runs
    same: int  # steps with the same loss and norm
    first: int | None = None  # the first different step; None without a difference
    loss: tuple[float, float] | None = None  # of the first different step, in the two runs
    norm: tuple[float, float] | None = None  # of the gradients in this step; None if a run has no norm

    def as_text(self) -> str:
        """The comparison as a line of text."""
        if self.first is None or self.loss is None:
            return (
                f"metrics: the same loss and norm in all {self.steps} steps"
                if self.steps
                else "metrics: no common step"
            )
        parts = [f"loss {self.loss[0]:.9g} and {self.loss[1]:.9g}"]
        if self.norm is not None:
            parts.append(f"norm {self.norm[0]:.9g} and {self.norm[1]:.9g}")
        same = f"metrics: the same in {self.same} of {self.steps} steps"
        return f"{same}; first apart at step {self.first}: {', '.join(parts)}"


def compare_metrics(folders: Sequence[Path]) -> ComparedMetrics:
    """Compare the metrics.jsonl of two runs. folders: of the runs. Raises ValueError as `read_logged`."""
    rows = []
    for folder in folders:
        values = [json.loads(each.text) for each in read_logged(folder / METRICS)]
        rows.append({each["step"]: (each["loss"], each.get("grad_norm")) for each in values})
    common = sorted(rows[0].keys() & rows[1].keys())
    apart = [step for step in common if rows[0][step] != rows[1][step]]
    if not apart:
        return ComparedMetrics(len(common), len(common))
    (loss, norm), (other_loss, other_norm) = rows[0][apart[0]], rows[1][apart[0]]
    norms = None if norm is None or other_norm is None else (norm, other_norm)
    return ComparedMetrics(len(common), len(common) - len(apart), apart[0], (loss, other_loss), norms)
