"""Qwen 2, 2.5 and 3, written for one device (Yang et al. 2024, 2025)."""

from __future__ import annotations

from ..decoder import Decoder
from ..layers import rowwise
from ..parallel.plan import ParallelPlan
from .config import QwenConfig
from .plan import PLAN


@rowwise
class Qwen(Decoder[QwenConfig]):
    """tokens [B, T] int64 -> logits [B, T, V].

    The parameters are unset until `initialize` or a checkpoint fills them, and are named as in Hugging Face's Qwen2 and Qwen3.
    Where config.dropout is above 0 a call while training has a `dropout_key`, made of the seed and the step.
    """

    def parallel_plan(self) -> ParallelPlan:
        """How the model is laid out where no other plan is given."""
        return PLAN
