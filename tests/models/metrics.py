"""The metrics of a step that nobody took."""

from __future__ import annotations

from typing import Any

from weft.models.train.report import Metrics

_STEP: dict[str, Any] = {
    "step": 1,
    "done": 0.5,
    "loss": 3.25,
    "grad_norm": 1.5,
    "lr": 0.1,
    "tokens_per_second": 3036.0,
    "tflops": 0.0082,
    "mfu": None,
    "memory_bytes": 420 * 2**20,
    "memory_share": 0.02,
    "communication_share": 0.31,
    "data_share": 0.001,
    "seconds_left": 83.0,
}


def some_metrics(**changes: Any) -> Metrics:
    return Metrics(**{**_STEP, **changes})
