"""A batch ahead: what a step needs is read while the step before it is computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls `read(step)` in a thread, one step ahead of those that are asked for in order; any other step is read at once.

    waited: seconds that the caller has waited for it, in all.
    Raises what `read` raises, where that step is asked for.
    """

    def __init__(self, read: Callable[[int], T]) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-data")
        self._next: tuple[int, Future[T]] | None = None
        self.waited = 0.0

    def begin(self, step: int) -> None:
        """Begins to read what is asked for next, and starts the thread."""
        self._next = (step, self._thread.submit(self._read, step))

    def __call__(self, step: int) -> T:
        """What `read` returns for the step; the next one is begun."""
        start = time.perf_counter()
        if self._next is not None and self._next[0] == step:
            found = self._next[1].result()
        else:
            found = self._read(step)
        self.begin(step + 1)
        self.waited += time.perf_counter() - start
        return found
