"""The config of a Llama."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import BlockOptions, RotaryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(RotaryConfig):
    """Sizes and constants of a Llama. Raises ValueError where sizes do not fit together."""

    attention_bias: bool = False
    """Give the attention's projections biases."""
    mlp_bias: bool = False
    """Give the MLPs' projections biases."""

    @property
    def title(self) -> str:
        """The family's name in messages."""
        return "Llama"

    def block(self, index: int) -> BlockOptions:
        """The options of block `index`; all blocks are alike."""
        return BlockOptions(qkv_bias=self.attention_bias, output_bias=self.attention_bias, mlp_bias=self.mlp_bias)
