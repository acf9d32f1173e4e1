"""The error of a layout that an operation cannot take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layout import Layout


class LayoutError(ValueError):
    """A tensor's layout does not fit what is asked of it; the message names the reshard that would.

    nearest: from layout inference, the layouts that the operands need for it, each where its operand stands; else empty.
    """

    def __init__(self, message: str, nearest: tuple[Layout, ...] = ()) -> None:
        super().__init__(message)
        self.nearest = nearest
