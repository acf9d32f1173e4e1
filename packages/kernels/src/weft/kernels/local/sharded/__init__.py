"""`on_local_tensors`, and the `Declaration` of layouts behind it."""

from .decorator import on_local_tensors

__all__ = ["on_local_tensors"]
