"""Keeps the tensors that reshards receive in forward, and returns them while a recomputation repeats the forward.

Selective recomputation (weft.models' parallel/recompute.py) uses this to send nothing twice. The executor starts
every plan with communication by `run_or_replay`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from .collectives import Pending, Running

Store = Callable[[Tensor], None]  # keeps a received tensor
_thread = threading.local()  # autograd runs the backward of each device on a separate thread


@contextmanager
def keeping(begin: Callable[[], Store]) -> Iterator[None]:
    """Inside, every reshard with communication hands over the tensor that it receives, to be kept.

    begin: called when a reshard starts; returns a function, which is called with the received tensor.
    """
    with _set("begin", begin):
        yield


@contextmanager
def giving(next_received: Callable[[], Tensor]) -> Iterator[None]:
    """Inside, a reshard that would communicate returns `next_received()` instead, and sends nothing."""
    with _set("next_received", next_received):
        yield


def run_or_replay(run: Callable[[], Running]) -> Pending:
    """Starts the collectives of `run`; inside `giving`, returns the tensor received earlier instead."""
    next_received: Callable[[], Tensor] | None = getattr(_thread, "next_received", None)
    if next_received is not None:
        return Pending.finished(next_received())
    begin: Callable[[], Store] | None = getattr(_thread, "begin", None)
    return Pending(run() if begin is None else _then_store(run(), begin()))


def _then_store(running: Running, store: Store) -> Running:
    result = yield from running
    store(result)
    return result


@contextmanager
def _set(name: str, value: object) -> Iterator[None]:
    before = getattr(_thread, name, None)
    setattr(_thread, name, value)
    try:
        yield
    finally:
        setattr(_thread, name, before)
