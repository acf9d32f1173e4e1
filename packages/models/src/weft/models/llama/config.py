"""The sizes of a Llama, checked when they are given."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import BlockOptions, RotaryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(RotaryConfig):
    """Sizes and constants of a Llama. Those that do not fit together are a ValueError."""

    attention_bias: bool = False
    """Biases in the attention's projections."""
    mlp_bias: bool = False
    """Biases in the MLPs' projections."""

    @property
    def title(self) -> str:
        """What such a model is called."""
        return "Llama"

    def block(self, index: int) -> BlockOptions:
        """What block `index` has: here all are alike."""
        return BlockOptions(qkv_bias=self.attention_bias, output_bias=self.attention_bias, mlp_bias=self.mlp_bias)
