"""experts: the gated MLPs of a mixture of experts, each on the tokens that chose it, as one op."""

from .sharded import experts

__all__ = ["experts"]
