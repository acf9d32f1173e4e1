"""rope: the op and what makes its tables, their local computations and layout rules."""

from .sharded import rope, rope_tables

__all__ = ["rope", "rope_tables"]
