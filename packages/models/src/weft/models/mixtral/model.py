"""Mixtral, written for one device (Jiang et al. 2024)."""

from __future__ import annotations

from ..decoder import MixtureDecoder
from .config import MixtralConfig


class Mixtral(MixtureDecoder[MixtralConfig]):
    """Mixtral: tokens [B, T] int64 -> logits [B, T, V], or with `router=True` the pair (logits, statistics).

    Parameters are unset until `initialize` or a checkpoint fills them. Parameter names are as in Hugging Face's
    Qwen3Moe, with the experts of a layer stacked: `layers.0.mlp.experts.gate_proj` [E, I, H]. In training, a config
    with dropout needs a `dropout_key` in each call, derived from the seed and the step.
    """
