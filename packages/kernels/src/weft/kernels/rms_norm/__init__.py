"""RMS norm: `rms_norm`, and `add_rms_norm` with a residual added first."""

from .sharded import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
