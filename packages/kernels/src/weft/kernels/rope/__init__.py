"""rope: the op, its local computation and its layout rule; alone, and after a norm of each head."""

from .sharded import rms_norm_rope, rope, rope_tables

__all__ = ["rms_norm_rope", "rope", "rope_tables"]
