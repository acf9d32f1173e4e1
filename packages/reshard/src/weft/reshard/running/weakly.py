"""`weakly`: hooks that do not keep objects alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that calls `method` while the method's object is alive.

    A strong reference from a torch hook could keep the object alive for good: the garbage collector does not see such
    references.
    """
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = found()
        if alive is not None:
            alive(*arguments)

    return call
