"""How rotary wavelengths are stretched beyond the context that a model was first trained on.

Each kind is what `transformers` 4.57 computes under the same name (its `modeling_rope_utils`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .checks import check_positive, check_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRopeScaling:
    """Every wavelength `factor` times longer, as if the positions were that much closer (Chen et al. 2023)."""

    factor: float

    def __post_init__(self) -> None:
        check_positive(self, "factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicRopeScaling:
    """Beyond max_seq_len the base grows with the length of the sequence that is read; up to it nothing changes.

    The base is rope_theta * (factor * length / max_seq_len - (factor - 1)) ** (D / (D - 2)): "NTK-aware" scaling, as in
    section 3.3 of Peng et al. 2023. The length is that of one call, the longest row's, and in microbatches that of the whole batch. What
    a cache holds keeps the base of its own.
    """

    factor: float

    def __post_init__(self) -> None:
        check_positive(self, "factor")
        if self.factor < 1:
            raise ValueError(f"DynamicRopeScaling: factor is {self.factor}; it must be >= 1, or the base would shrink")


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
        check_positive(self, "factor", "low_freq_factor", "high_freq_factor")
        check_sizes(self, "original_max_seq_len")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"Llama3RopeScaling: high_freq_factor {self.high_freq_factor} must be above low_freq_factor "
                f"{self.low_freq_factor}; Llama 3.1 has 4 and 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRopeScaling:
    """YaRN (Peng et al. 2023): pairs that turn seldom are stretched by `factor`, and the tables are scaled.

    Pairs that turn more than beta_fast times in the original context stay; those that turn less than beta_slow times are
    stretched; those in between blend, by their number. truncate: the bounds of that blend are whole numbers.
    attention_factor: what cosine and sine are multiplied by; 0.1 * ln(factor) + 1 where None.
    """

    factor: float
    original_max_seq_len: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        check_positive(self, "factor", "beta_fast", "beta_slow")
        check_sizes(self, "original_max_seq_len")
        if self.attention_factor is not None:
            check_positive(self, "attention_factor")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"YarnRopeScaling: beta_fast {self.beta_fast} must be at least beta_slow {self.beta_slow}; YaRN has 32 and 1"
            )

    @property
    def table_scale(self) -> float:
        """What cosine and sine are multiplied by."""
        return magnitude(self.factor) if self.attention_factor is None else self.attention_factor


RopeScaling = LinearRopeScaling | DynamicRopeScaling | Llama3RopeScaling | YarnRopeScaling


def magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's multiplier of cosine and sine for a stretch by `factor` (Peng et al. 2023, eq. 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """All that rotary tables follow from. max_seq_len: of the model, from which dynamic scaling sets in."""

    head_dim: int
    theta: float
    max_seq_len: int
    scaling: RopeScaling | None = None

    @property
    def table_scale(self) -> float:
        """What cosine and sine are multiplied by."""
        return self.scaling.table_scale if isinstance(self.scaling, YarnRopeScaling) else 1.0

    @property
    def longest(self) -> int:
        """The longest context that the model is meant for, in tokens.

        Linear and dynamic scaling lengthen max_seq_len `factor` times: transformers asks that max_position_embeddings stays as it
        was. YaRN lengthens the original context; where max_seq_len is the longer, it was set to that already. Llama 3.1's
        max_seq_len is the scaled length. vLLM derives the same lengths.
        """
        if isinstance(self.scaling, LinearRopeScaling | DynamicRopeScaling):
            return max(self.max_seq_len, int(self.max_seq_len * self.scaling.factor))
        if isinstance(self.scaling, YarnRopeScaling):
            return max(self.max_seq_len, int(self.scaling.original_max_seq_len * self.scaling.factor))
        return self.max_seq_len

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies are others for a longer sequence."""
        return isinstance(self.scaling, DynamicRopeScaling)
