"""The config of a Llama or Mistral."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import check_sizes
from ..config import BlockOptions, RotaryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(RotaryConfig):
    """Sizes and constants of a Llama or Mistral. Raises ValueError where sizes do not fit together."""

    attention_bias: bool = False
    """Give the attention's projections biases."""
    mlp_bias: bool = False
    """Give the MLPs' projections biases."""
    sliding_window: int = 0
    """In all layers, the number of most recent keys visible to a query; 0: every key up to the query's own."""
    mistral: bool = False
    """Write Hugging Face folders as model_type mistral, not llama. Always on with a sliding window."""

    def __post_init__(self) -> None:
        RotaryConfig.__post_init__(self)
        if self.sliding_window != 0:
            check_sizes(self, "sliding_window")
            object.__setattr__(self, "mistral", True)
        biases = [name for name in ("attention_bias", "mlp_bias") if getattr(self, name)]
        if self.mistral and biases:
            raise ValueError(
                f"LlamaConfig: {biases[0]} is True with sliding_window {self.sliding_window} and mistral "
                f"{self.mistral}, and a Mistral has no biases; leave out {' and '.join(biases)}, or both of "
                f"sliding_window and mistral"
            )

    @property
    def title(self) -> str:
        """The family's name in messages."""
        return "Mistral" if self.mistral else "Llama"

    def block(self, index: int) -> BlockOptions:
        """The options of block `index`; all blocks are alike."""
        return BlockOptions(
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            window=self.sliding_window or None,
        )
