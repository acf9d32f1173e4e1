"""The config of a GPT-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..checks import check_positive, check_probabilities, check_sizes, check_table
from ..config import ModelConfig

Activation = Literal["gelu_new", "gelu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig(ModelConfig):
    """Sizes and constants of a GPT-2. Raises ValueError where sizes do not fit together."""

    max_seq_len: int = 1024
    """Number of learned positions: the most tokens in a sequence."""
    tie_embeddings: bool = True
    """Share one table between the embedding and the output."""
    intermediate_size: int = 0
    """Width inside the MLPs; 0: 4 * hidden_size."""
    activation: Activation = "gelu_new"
    """Activation in the MLPs: gelu, or gelu_new, the tanh approximation that GPT-2 was trained with."""
    norm_eps: float = 1e-5
    """Epsilon added to the variance in norms."""
    scale_attention: bool = True
    """Divide attention scores by the square root of a head's width."""
    scale_attention_by_layer: bool = False
    """Divide attention scores by the layer's number, too, counted from 1."""
    embedding_dropout: float = 0.0
    """Probability of zeroing an element of the sum of token and position embeddings."""
    attention_dropout: float = 0.0
    """Probability of zeroing an attention weight."""
    dropout: float = 0.0
    """Probability of zeroing an element of a block's additions to the residual stream."""

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.intermediate_size == 0:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)
        check_sizes(self, "intermediate_size")
        check_table(self, "max_seq_len", "hidden_size")
        check_table(self, "hidden_size", "intermediate_size")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"GPTConfig: hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; change one"
            )
        check_positive(self, "norm_eps")
        check_probabilities(self, "embedding_dropout", "attention_dropout", "dropout")

    @property
    def title(self) -> str:
        """The family's name in messages."""
        return "GPT-2"

    @property
    def is_length_independent(self) -> bool:
        """False: max_seq_len is the number of rows in the table of positions."""
        return False

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads

    @property
    def num_in_tables(self) -> int:
        """Parameters in the tables of the embedding, the positions and the output; a tied table counts once."""
        return (self.vocab_size * (1 if self.tie_embeddings else 2) + self.max_seq_len) * self.hidden_size

    def attention_scale(self, index: int) -> float:
        """The factor on the attention scores of block `index`."""
        scale = self.head_dim**-0.5 if self.scale_attention else 1.0
        return scale / (index + 1) if self.scale_attention_by_layer else scale

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; a tied table counts once."""
        H, inner = self.hidden_size, self.intermediate_size
        block = 4 * H * (H + 1) + 2 * H * inner + inner + H + 4 * H
        return self.num_in_tables + self.num_layers * block + 2 * H

    @property
    def num_looked_up(self) -> int:
        """Parameters in lookup tables that take part in no product: positions, and an untied embedding."""
        return (0 if self.tie_embeddings else self.vocab_size * self.hidden_size) + self.max_seq_len * self.hidden_size

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """Name -> size, of the sizes divided by tensor parallelism."""
        return {name: getattr(self, name) for name in ("num_heads", "hidden_size", "intermediate_size")}
