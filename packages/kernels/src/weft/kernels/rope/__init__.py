"""Rotary position embedding: `rope`, `rope_tables`, and `rms_norm_rope` with an RMS norm of each head first."""

from .sharded import rms_norm_rope, rope, rope_tables

__all__ = ["rms_norm_rope", "rope", "rope_tables"]
