"""The config shared by the families with mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check_coefficients, check_counts, check_table
from .config import RotaryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig(RotaryConfig):
    """Sizes and constants of the families with mixtures of experts, and the coefficients of their routers' losses."""

    num_experts: int
    """Experts of a layer."""
    experts_per_token: int
    """Experts that each token is sent to."""
    router_aux_loss_coef: float = 0.001
    """Coefficient of the balance loss, whose least value, reached by an even load, is experts_per_token."""
    seq_aux: bool = False
    """The balance loss is the mean of each sequence's own, as in DeepSeek-V3, and not of the batch's experts."""
    router_z_loss_coef: float = 0.0
    """Coefficient of the mean squared logsumexp of the routers' logits."""

    def __post_init__(self) -> None:
        RotaryConfig.__post_init__(self)
        where = type(self).__name__
        check_counts(self, "num_experts", "experts_per_token")
        check_table(self, "num_experts", "hidden_size", "intermediate_size")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"{where}: experts_per_token {self.experts_per_token} is above num_experts {self.num_experts}; a "
                f"token's experts are distinct: give at most {self.num_experts}"
            )
        check_coefficients(where, self, "router_aux_loss_coef", "router_z_loss_coef")

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with a mixture of experts, ascending; the rest are dense."""
        return tuple(range(self.num_layers))

    @property
    def bias_rate(self) -> float:
        """The change of a router's correction bias after each step; 0 without correction biases."""
        return 0.0

    @property
    def num_active_parameters(self) -> int:
        """The number of parameters used for a token: `experts_per_token` experts of each sparse layer, and the rest."""
        unused = 0
        for index in self.sparse_layers:
            options = self.block(index).experts
            assert options is not None, "a sparse layer has experts"
            unused += (
                3 * self.hidden_size * options.intermediate_size * (options.num_experts - options.experts_per_token)
            )
        return self.num_parameters - unused

    @property
    def num_multiplied(self) -> int:
        """The number of parameters in matrix products for a token: `num_active_parameters` without looked-up tables."""
        return self.num_active_parameters - self.num_looked_up
