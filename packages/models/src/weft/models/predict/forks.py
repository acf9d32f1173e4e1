"""`Forks`: forked processes that make calls for this process, several at a time.

For runs on shapes, which use neither threads nor devices. Forked processes have the functions, and all that the
functions read, from this process: a call's arguments and results alone are pickled.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any

_Call = tuple[int, tuple[Any, ...]]  # the index of a function of a `Forks`, and hashable arguments

_functions: Sequence[Callable[..., Any]] = ()  # in a forked process: the functions of its `Forks`


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Forks:
    """Makes calls of `functions` in forked processes, begun with the first call. A context manager, which ends them.

    count: the number of processes; with 1, none is forked, and each call is made here.
    A call that fails in a process is left to this process, whatever the reason: an error, too little memory, or the
    threads of a GPU's autograd, which a fork lacks. So results and errors are those of a single process.
    """

    def __init__(self, *functions: Callable[..., Any], count: int) -> None:
        self._functions, self._count = functions, count
        self._executor: ProcessPoolExecutor | None = None
        self._children: list[multiprocessing.process.BaseProcess] = []
        self._futures: dict[_Call, Future[Any]] = {}  # of calls whose result nobody has taken

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self._children:
            child.kill()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    @property
    def has_room(self) -> bool:
        """Whether a call started now would keep a process from being idle."""
        return self._count > 1 and sum(not each.done() for each in self._futures.values()) < self._count

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have the call made in a process, unless it was started before. With a count of 1, do nothing."""
        if self._count > 1 and (call := (self._functions.index(function), arguments)) not in self._futures:
            with suppress(BrokenProcessPool):  # a process was killed: this process makes the call
                self._futures[call] = self._submit(*call)

    def result(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The call's result, from a process or else computed here. Raises the call's error."""
        found = self.take(function, *arguments)
        return function(*arguments) if found is None else found[0]

    def take(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any] | None:
        """The result of the call in a process; None where the call failed there, and with a count of 1."""
        if self._count == 1:
            return None
        self.start(function, *arguments)
        future = self._futures.pop((self._functions.index(function), arguments), None)
        return None if future is None or future.exception() is not None else (future.result(),)

    def _submit(self, index: int, arguments: tuple[Any, ...]) -> Future[Any]:
        if self._executor is not None:
            return self._executor.submit(_call, index, arguments)
        context = multiprocessing.get_context("fork")
        self._executor = ProcessPoolExecutor(self._count, context, _begin, (self._functions,))
        earlier = {*multiprocessing.active_children()}
        # Ctrl-C waits until every process is forked, and in a process until `_begin`. Else Python prints the error of a
        # process that ends in the middle of a fork.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            future = self._executor.submit(_call, index, arguments)  # forks all processes, before any thread is started
            self._children = [each for each in multiprocessing.active_children() if each not in earlier]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return future


def _begin(functions: Sequence[Callable[..., Any]]) -> None:
    """Begin a forked process."""
    global _functions
    _functions = functions
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    gc.freeze()  # a collection would copy all memory shared with the parent


def _call(index: int, arguments: tuple[Any, ...]) -> Any:
    """A call in a forked process."""
    return _functions[index](*arguments)
