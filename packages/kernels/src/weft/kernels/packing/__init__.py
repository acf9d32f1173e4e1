"""pack and unpack: the ops, their local computation and layout rules."""

from .sharded import pack, unpack

__all__ = ["pack", "unpack"]
