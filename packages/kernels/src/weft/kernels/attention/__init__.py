"""attention: the op, its local computation and its layout rule."""

from .sharded import attention

__all__ = ["attention"]
