"""pack and unpack: tensors joined for a single reshard of all of them."""

from .sharded import pack, unpack

__all__ = ["pack", "unpack"]
