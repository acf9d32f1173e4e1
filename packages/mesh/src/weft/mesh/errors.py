"""The error of a layout that an operation cannot take."""

from __future__ import annotations


class LayoutError(ValueError):
    """A tensor's layout does not fit what is asked of it; the message names the reshard that would."""
