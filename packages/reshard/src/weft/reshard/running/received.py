"""What reshards received, kept so that a computation that is repeated need not move it again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from .collectives import Pending, Running

Take = Callable[[Tensor], None]
_here = threading.local()  # a device's backward runs on a thread of its own


@contextmanager
def keeping(begin: Callable[[], Take]) -> Iterator[None]:
    """Within it `begin` is called whenever a reshard starts to communicate, and what it returned with what was received."""
    with _set("begin", begin):
        yield


@contextmanager
def giving(next_received: Callable[[], Tensor]) -> Iterator[None]:
    """Within it a reshard that would communicate has what `next_received` returns, and moves nothing."""
    with _set("next_received", next_received):
        yield


def run_or_given(run: Callable[[], Running]) -> Pending:
    """What communicates, started; or what it received before, within `giving`."""
    next_received: Callable[[], Tensor] | None = getattr(_here, "next_received", None)
    if next_received is not None:
        return Pending.finished(next_received())
    begin: Callable[[], Take] | None = getattr(_here, "begin", None)
    return Pending(run() if begin is None else _taken(run(), begin()))


def _taken(running: Running, take: Take) -> Running:
    result = yield from running
    take(result)
    return result


@contextmanager
def _set(name: str, value: object) -> Iterator[None]:
    before = getattr(_here, name, None)
    setattr(_here, name, value)
    try:
        yield
    finally:
        setattr(_here, name, before)
