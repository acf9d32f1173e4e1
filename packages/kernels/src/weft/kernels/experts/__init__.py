"""`experts`: the gated MLPs of a mixture of experts, each on the tokens which chose the expert."""

from .sharded import experts

__all__ = ["experts"]
