"""on_local_tensors, and the declaration of layouts that it is given."""

from .decorator import on_local_tensors

__all__ = ["on_local_tensors"]
