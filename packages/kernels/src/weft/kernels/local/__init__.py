"""`on_local_tensors` makes a user's function on local tensors take DTensors, by declared layouts."""

from .sharded import on_local_tensors

__all__ = ["on_local_tensors"]
