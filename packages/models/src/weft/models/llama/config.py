"""The sizes of a Llama, checked when they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's stretch of the rotary wavelengths beyond the context it was first trained on.

    Wavelengths above original_max_seq_len / low_freq_factor are made `factor` times longer, those below
    original_max_seq_len / high_freq_factor stay, and those in between blend.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def __post_init__(self) -> None:
        _positive(self, "factor", "low_freq_factor", "high_freq_factor")
        _sizes(self, "original_max_seq_len")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"Llama3RopeScaling: high_freq_factor {self.high_freq_factor} must be above low_freq_factor "
                f"{self.low_freq_factor}; Llama 3.1 has 4 and 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of a Llama. Those that do not fit together are a ValueError."""

    vocab_size: int
    """Tokens that there are."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the MLPs."""
    num_layers: int
    """Transformer blocks."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int = 0
    """Key and value heads, shared by groups of query heads; 0: as many as query heads."""
    head_dim: int = 0
    """Width of a head; 0: hidden_size / num_heads."""
    max_seq_len: int = 2048
    """Tokens in the longest sequence that the model is trained on."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: Llama3RopeScaling | None = None
    """Llama 3.1's stretch of the rotary wavelengths."""
    norm_eps: float = 1e-6
    """Added to the mean square in norms."""
    tie_embeddings: bool = False
    """One table for embedding and output."""
    attention_bias: bool = False
    """Biases in the attention's projections."""
    mlp_bias: bool = False
    """Biases in the MLPs' projections."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    attention_dropout: float = 0.0
    """Probability of zeroing a weight of the attention."""
    dropout: float = 0.0
    """Probability of zeroing an element of the embedding's output, and of what a block adds to the residual stream."""

    def __post_init__(self) -> None:
        _sizes(self, "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "max_seq_len")
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.head_dim == 0:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"LlamaConfig: hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; "
                    f"change one, or give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        _sizes(self, "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            degrees = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"LlamaConfig: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                f"use one of {degrees}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"LlamaConfig: head_dim {self.head_dim} is odd, but rotary embedding turns pairs; make it even"
            )
        _positive(self, "rope_theta", "norm_eps")
        if self.initializer_range != 0:
            _positive(self, "initializer_range")
        for name in ("attention_dropout", "dropout"):
            p = getattr(self, name)
            if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
                raise ValueError(f"LlamaConfig: {name} is {p!r}; it must be a number in 0 <= {name} < 1")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, Llama3RopeScaling):
            raise ValueError(f"LlamaConfig: rope_scaling is {self.rope_scaling!r}; give a Llama3RopeScaling, or None")

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, a tied table counted once."""
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (width + kv_width)
        mlp = 3 * self.hidden_size * self.intermediate_size
        biases = self.attention_bias * (width + 2 * kv_width + self.hidden_size)
        biases += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        layer = attention + mlp + biases + 2 * self.hidden_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return tables + self.num_layers * layer + self.hidden_size


def check_tensor_parallel(config: LlamaConfig, ways: int) -> None:
    """Raises ValueError where heads or hidden sizes cannot be cut in `ways`, listing the degrees that work.

    Key heads are fewer than `ways` where they divide it: each then lies on several ranks.
    """
    misfits = _misfits(config, ways)
    if misfits:
        works = [n for n in range(1, config.num_heads + 1) if not _misfits(config, n)]
        raise ValueError(
            f"tp={ways} does not divide {' and '.join(misfits)}; degrees that work: {', '.join(map(str, works))}"
        )


def _misfits(config: LlamaConfig, ways: int) -> list[str]:
    sizes = ("num_heads", "num_kv_heads", "hidden_size", "intermediate_size")
    found = [name for name in sizes if getattr(config, name) % ways]
    if ways % config.num_kv_heads == 0:
        found = [name for name in found if name != "num_kv_heads"]
    return [f"{name} {getattr(config, name)}" for name in found]


def _sizes(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{type(config).__name__}: {name} is {value!r}; it must be an int >= 1")


def _positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ValueError(f"{type(config).__name__}: {name} is {value!r}; it must be a number > 0")
