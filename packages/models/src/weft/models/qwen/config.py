"""The config of a Qwen 2, 2.5 or 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ..checks import check_sizes
from ..config import BlockOptions, RotaryConfig, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenConfig(RotaryConfig):
    """Sizes and constants of a Qwen. Raises ValueError where sizes do not fit together."""

    version: Literal[2, 3] = 3
    """2 (also for 2.5): biases in the query, key and value projections. 3: a norm of each query and key head."""
    attention_bias: bool = False
    """Version 3: biases in all of the attention's projections."""
    sliding_window: int = 0
    """In the sliding layers, the number of most recent keys visible to a query; 0: no sliding layers."""
    sliding_layers: Annotated[tuple[int, ...], shown("INT", "no layer")] = ()
    """The layers with the window, counted from 0; in all further layers a query sees every key up to its own."""

    def __post_init__(self) -> None:
        RotaryConfig.__post_init__(self)
        if self.version == 2 and self.attention_bias:
            raise ValueError(
                "QwenConfig: attention_bias is an option of version 3; version 2 has biases for q, k and v alone: "
                "leave the option out"
            )
        if self.sliding_window != 0:
            check_sizes(self, "sliding_window")
        if bool(self.sliding_layers) != bool(self.sliding_window):
            raise ValueError(
                f"QwenConfig: sliding_window is {self.sliding_window} and sliding_layers {self.sliding_layers}; "
                f"give both, or neither"
            )
        outside = [layer for layer in self.sliding_layers if layer not in range(self.num_layers)]
        if outside or list(self.sliding_layers) != sorted(set(self.sliding_layers)):
            raise ValueError(
                f"QwenConfig: sliding_layers is {self.sliding_layers}; give each layer once, in order, of 0 to "
                f"{self.num_layers - 1}"
            )

    @property
    def title(self) -> str:
        """The family's name in messages."""
        return f"Qwen {self.version}"

    def block(self, index: int) -> BlockOptions:
        """The options of block `index`."""
        return BlockOptions(
            qkv_bias=self.version == 2 or self.attention_bias,
            output_bias=self.attention_bias,
            qk_norm=self.version == 3,
            window=self.sliding_window if index in self.sliding_layers else None,
        )
