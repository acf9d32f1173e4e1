"""Qwen 2, 2.5 and 3, written for one device (Yang et al. 2024, 2025)."""

from __future__ import annotations

from dataclasses import replace

from ..decoder import TENSOR_STYLES, Decoder
from ..layers import row_independent
from ..parallel.plan import ParallelPlan
from .config import QwenConfig

PLAN = ParallelPlan(tensor=TENSOR_STYLES)


@row_independent
class Qwen(Decoder[QwenConfig]):
    """Qwen: tokens [B, T] int64 -> logits [B, T, V].

    Parameters are unset until `initialize` or a checkpoint fills them. Parameter names are as in Hugging Face's Qwen2
    and Qwen3.
    In training, a config with dropout needs a `dropout_key` in each call, derived from the seed and the step.
    """

    def parallel_plan(self) -> ParallelPlan:
        """The default plan of `parallelize`."""
        return replace(PLAN, windows=self.windows)
