"""Hooks that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """`method` as long as its object lives: the garbage collector does not see what torch's hooks hold."""
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = found()
        if alive is not None:
            alive(*arguments)

    return call
