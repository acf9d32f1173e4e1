"""Llama, written for a single device (Touvron et al. 2023), with grouped queries and the later rotary scalings.

With a sliding window in every layer, the same network is Mistral (Jiang et al. 2023).
"""

from __future__ import annotations

from dataclasses import replace

from ..decoder import TENSOR_STYLES, Decoder
from ..layers import row_independent
from ..parallel.plan import ParallelPlan
from .config import LlamaConfig

PLAN = ParallelPlan(tensor=TENSOR_STYLES)


@row_independent
class Llama(Decoder[LlamaConfig]):
    """Llama: tokens [B, T] int64 -> logits [B, T, V].

    Parameters are unset until `initialize` or a checkpoint fills them. Parameter names are as in Hugging Face's
    Llama. In training, a config with dropout needs a `dropout_key` in each call, derived from the seed and the step.
    """

    def parallel_plan(self) -> ParallelPlan:
        """The default plan of `parallelize`."""
        return replace(PLAN, windows=self.windows)
