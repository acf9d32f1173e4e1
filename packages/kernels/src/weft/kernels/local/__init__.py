"""on_local_tensors: a user's function on local tensors, which declares its layouts and takes DTensors then."""

from .sharded import on_local_tensors

__all__ = ["on_local_tensors"]
