"""Settings that stretch rotary wavelengths beyond a model's original context.

Each kind computes the same as the kind of this name in `transformers` 4.57 (`modeling_rope_utils`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .checks import check_kinds, check_positive, check_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRopeScaling:
    """Makes every wavelength `factor` times longer, as if positions were `factor` times closer (Chen et al. 2023)."""

    factor: float

    def __post_init__(self) -> None:
        check_kinds(None, self)
        check_positive(self, "factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicRopeScaling:
    """Beyond max_seq_len, grows the base with the length of the sequence; up to max_seq_len nothing changes.

    The base is rope_theta * (factor * length / max_seq_len - (factor - 1)) ** (D / (D - 2)): "NTK-aware" scaling,
    section 3.3 of Peng et al. 2023. The length is the longest row's in a call, and with microbatches the longest
    row's of the whole batch. Keys in a cache keep the base with which they were computed.
    """

    factor: float

    def __post_init__(self) -> None:
        check_kinds(None, self)
        check_positive(self, "factor")
        if self.factor < 1:
            raise ValueError(f"DynamicRopeScaling: factor is {self.factor}; it must be >= 1, or the base would shrink")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's stretching of rotary wavelengths beyond the original context.

    Wavelengths above original_max_seq_len / low_freq_factor become `factor` times longer. Wavelengths below
    original_max_seq_len / high_freq_factor stay. Wavelengths in between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def __post_init__(self) -> None:
        check_kinds(None, self)
        check_positive(self, "factor", "low_freq_factor", "high_freq_factor")
        check_sizes(self, "original_max_seq_len")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"Llama3RopeScaling: high_freq_factor {self.high_freq_factor} must be above low_freq_factor "
                f"{self.low_freq_factor}; Llama 3.1 has 4 and 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRopeScaling:
    """YaRN (Peng et al. 2023): makes the longest wavelengths `factor` times longer, and scales cosine and sine.

    A wavelength belongs to a pair of a head's elements. Pairs with more than beta_fast rotations in the original
    context keep the wavelength. Pairs with fewer than beta_slow rotations get the longer wavelength. Pairs in between
    get a blend, linear in the pair's index.
    """

    factor: float
    original_max_seq_len: int
    attention_factor: float | None = None  #: multiplies cosine and sine; None: 0.1 * ln(factor) + 1
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  #: round the bounds of the blend to whole numbers

    def __post_init__(self) -> None:
        check_kinds(None, self)
        check_positive(self, "factor", "beta_fast", "beta_slow")
        check_sizes(self, "original_max_seq_len")
        if self.attention_factor is not None:
            check_positive(self, "attention_factor")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"YarnRopeScaling: beta_fast {self.beta_fast} must be at least beta_slow {self.beta_slow}; YaRN has "
                f"32 and 1"
            )

    @property
    def table_scale(self) -> float:
        """The factor on cosine and sine."""
        return magnitude(self.factor) if self.attention_factor is None else self.attention_factor


RopeScaling = LinearRopeScaling | DynamicRopeScaling | Llama3RopeScaling | YarnRopeScaling


def magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor on cosine and sine for a stretch by `factor` (Peng et al. 2023, eq. 22).

    weight: multiplies the logarithm; 1 in the paper, mscale or mscale_all_dim in config.json.
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """All settings of the rotary tables."""

    head_dim: int
    theta: float
    max_seq_len: int  # of the model; dynamic scaling begins beyond
    scaling: RopeScaling | None = None

    @property
    def table_scale(self) -> float:
        """The factor on cosine and sine."""
        return self.scaling.table_scale if isinstance(self.scaling, YarnRopeScaling) else 1.0

    @property
    def longest(self) -> int:
        """The longest context that the model is meant for, in tokens.

        Linear and dynamic scaling: `factor` times max_seq_len, because transformers keeps max_position_embeddings at
        the unscaled length.
        YaRN: `factor` times the original length, or max_seq_len if larger: some models give the scaled length there.
        Llama 3.1: max_seq_len, which is the scaled length. vLLM derives the same lengths.
        """
        if isinstance(self.scaling, LinearRopeScaling | DynamicRopeScaling):
            return max(self.max_seq_len, int(self.max_seq_len * self.scaling.factor))
        if isinstance(self.scaling, YarnRopeScaling):
            return max(self.max_seq_len, int(self.scaling.original_max_seq_len * self.scaling.factor))
        return self.max_seq_len

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return isinstance(self.scaling, DynamicRopeScaling)
