"""The config of a Mixtral."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import check_sizes
from ..config import BlockOptions, ExpertOptions, MixtureConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(MixtureConfig):
    """Sizes and constants of a Mixtral; intermediate_size is the width inside an expert.

    Raises ValueError as MixtureConfig.
    """

    num_experts: int = 8
    """Experts of a layer."""
    experts_per_token: int = 2
    """Experts that each token is sent to."""
    sliding_window: int = 0
    """In all layers, the number of most recent keys visible to a query; 0: every key up to the query's own."""

    def __post_init__(self) -> None:
        MixtureConfig.__post_init__(self)
        if self.sliding_window != 0:
            check_sizes(self, "sliding_window")

    def block(self, index: int) -> BlockOptions:
        """The options of block `index`; all blocks are alike."""
        return BlockOptions(
            window=self.sliding_window or None,
            experts=ExpertOptions(
                intermediate_size=self.intermediate_size,
                num_experts=self.num_experts,
                experts_per_token=self.experts_per_token,
            ),
        )
