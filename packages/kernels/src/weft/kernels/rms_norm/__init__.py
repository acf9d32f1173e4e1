"""rms_norm: the op, its local computation and its layout rule; alone, and of a sum with a residual."""

from .sharded import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
