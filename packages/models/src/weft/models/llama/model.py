"""Llama, written for one device (Touvron et al. 2023; with grouped queries and the later rotary scalings)."""

from __future__ import annotations

from ..decoder import Decoder
from ..layers import rowwise
from ..parallel.plan import ParallelPlan
from .config import LlamaConfig
from .plan import PLAN


@rowwise
class Llama(Decoder[LlamaConfig]):
    """tokens [B, T] int64 -> logits [B, T, V].

    The parameters are unset until `initialize` or a checkpoint fills them, and are named as in Hugging Face's Llama.
    Where config.dropout is above 0 a call while training has a `dropout_key`, made of the seed and the step.
    """

    def parallel_plan(self) -> ParallelPlan:
        """How the model is laid out where no other plan is given."""
        return PLAN
