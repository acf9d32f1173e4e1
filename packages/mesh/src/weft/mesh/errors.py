"""The error of a layout that an operation cannot take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layout import Layout


class LayoutError(ValueError):
    """A tensor's layout does not fit what is asked of it; the message names the reshard that would.

    nearest: where layout inference refuses, layouts that the operands could have instead, each where its operand stands;
        empty where there are none, and in other errors.
    """

    def __init__(self, message: str, nearest: tuple[Layout, ...] = ()) -> None:
        super().__init__(message)
        self.nearest = nearest
