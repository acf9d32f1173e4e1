"""Hooks that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that calls `method` as long as the method's object lives: the garbage collector does not see references from torch's hooks."""
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = found()
        if alive is not None:
            alive(*arguments)

    return call
