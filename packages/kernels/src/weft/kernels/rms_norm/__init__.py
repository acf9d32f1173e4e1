"""rms_norm: the op, its local computation and its layout rule."""

from .sharded import rms_norm

__all__ = ["rms_norm"]
