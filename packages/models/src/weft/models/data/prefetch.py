"""Reads the next step's batch while the current step is computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls `read(step)` in a thread, a step ahead of the caller; a step asked for out of order is read at once.

    Raises what `read` raises, when the caller asks for the step.
    """

    def __init__(self, read: Callable[[int], T]) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-data")
        self._next: tuple[int, Future[T]] | None = None
        self.waited = 0.0  # seconds that the caller has waited, in all

    def begin(self, step: int) -> None:
        """Start the thread, and begin to read `step`, the next to be asked for."""
        self._next = (step, self._thread.submit(self._read, step))

    def __call__(self, step: int) -> T:
        """The result of `read` for the step; begins to read the next step."""
        start = time.perf_counter()
        if self._next is not None and self._next[0] == step:
            found = self._next[1].result()
        else:
            found = self._read(step)
        self.begin(step + 1)
        self.waited += time.perf_counter() - start
        return found
