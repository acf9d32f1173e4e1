"""Worker processes for distributed tests. They import torch once, and are reused by later tests.

    def gathered(x): ...  # a function of a test module; runs on every rank, with torch.distributed initialized
    results = pool.run(gathered, x, ranks=4)  # by rank

The workers are forked from a server, where torch is imported already. Each call has its own process group (gloo).
When a rank fails, dies or hangs, the workers of the call are killed, and the next call starts new workers. A worker is
also replaced when too many groups of earlier calls are alive in the process: torch keeps groups alive with compiled
code.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.limits import PATIENCE

MAX_RANKS = 8
# Threads allowed in a worker after a call. A live group has three, and a loop that wakes up 100 times a second.
MAX_THREADS = 40
GRACE_SECONDS = 3.0  # for the other ranks to answer after one has failed
# Includes the imports of the first torch.compile, which would take a second and a half in every worker.
PRELOADED = [
    *("torch", "torch._inductor.compile_fx", "weft.models", "pytest", __name__),
    *("tests.support.propagation", "tests.support.draws"),
    *("weft.models.cli.train", "weft.models.cli.command", "weft.models.train.loop", "tests.support.preloaded"),
]
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Otherwise a worker that compiles starts a pool of processes, which import torch again.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # Otherwise a rank with nothing to do leaves while other ranks still connect, and these ranks fail.
    "TORCH_DIST_INIT_BARRIER": "1",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank failed."""

    rank: int
    seconds: float  # since the call began
    what: str

    def __str__(self) -> str:
        return f"rank {self.rank}, after {self.seconds:.1f} s: {self.what}"


class RanksFailed(RuntimeError):
    """Some ranks of a call failed. `failures` has the cause first: ranks that died, then by time."""

    def __init__(self, function: str, ranks: int, failures: list[Failure]) -> None:
        self.failures = tuple(failures)
        super().__init__(f"{len(failures)} of {ranks} ranks failed in {function}\n\n" + "\n".join(map(str, failures)))


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    rank: int
    ranks: int
    store: str  # file through which the ranks of the call connect
    timeout: float


@dataclass(frozen=True, slots=True)
class _Answer:
    ok: bool  # whether the function returned
    moment: float  # when it ended, by time.monotonic()
    value: Any  # the function's result, or the traceback
    threads: int = 0  # threads in the worker after the call's groups are destroyed


@dataclass(frozen=True, slots=True)
class _Worker:
    process: ForkServerProcess
    connection: Connection
    stacks: Path  # where the worker writes its stacks on SIGUSR1

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class Pool:
    """Gloo worker processes, started when first needed. Close the pool, or use it as a context."""

    def __init__(self, answers: Path | None = None) -> None:
        """answers: folder for answers of sharding propagation, kept between runs; see `tests.support.propagation`."""
        self._workers: list[_Worker] = []
        self._answers = answers
        self._folder = tempfile.TemporaryDirectory(prefix="weft-pool-")
        self._calls = 0
        self._started = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *arguments: Any, ranks: int = 4, timeout: float = PATIENCE
    ) -> list[Any]:
        """Call `function(*arguments)` on `ranks` processes; returns the results by rank.

        function: at the top level of a module. Arguments and results are pickled; tensors are copied.
        timeout: in seconds.
        Communication: a new gloo world of size `ranks`, destroyed when the call ends.
        Raises RanksFailed when a rank raises, dies or does not answer in time. Raises ValueError for a bad number of
        ranks.
        """
        if not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"a pool runs 1 to {MAX_RANKS} ranks, not {ranks}")
        self._calls += 1
        store = str(Path(self._folder.name) / f"store-{self._calls}")
        calls = [_Call(function, arguments, rank, ranks, store, timeout) for rank in range(ranks)]
        messages = [pickle.dumps(call) for call in calls]
        self._discard([worker for worker in self._workers if not worker.process.is_alive()])
        while len(self._workers) < ranks:
            self._workers.append(self._start())
        workers = self._workers[:ranks]
        try:
            for worker, message in zip(workers, messages, strict=True):
                worker.connection.send_bytes(message)
            results, failures = _collect(workers, timeout)
        except BaseException:  # Ctrl-C, or the test's own time limit
            self._discard(workers)
            raise
        if failures:
            self._discard(workers)
            raise RanksFailed(f"{function.__module__}.{function.__qualname__}", ranks, failures)
        self._discard([worker for rank, worker in enumerate(workers) if results[rank].threads > MAX_THREADS])
        return [results[rank].value for rank in range(ranks)]

    def close(self) -> None:
        """End all workers. The pool can be used again afterwards."""
        self._discard(list(self._workers))

    def _start(self) -> _Worker:
        self._started += 1
        stacks = Path(self._folder.name) / f"stacks-{self._started}"
        connection, workers_end = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(workers_end, str(stacks), self._answers), daemon=True)
        with worker_environment():
            process.start()
        workers_end.close()
        return _Worker(process, connection, stacks)

    def _discard(self, workers: list[_Worker]) -> None:
        for worker in workers:
            worker.kill()
            self._workers.remove(worker)


def _collect(workers: list[_Worker], timeout: float) -> tuple[dict[int, _Answer], list[Failure]]:
    """Wait for every worker. Returns the answers by rank, and the failures with the cause first."""
    start = time.monotonic()
    end = start + timeout
    results: dict[int, _Answer] = {}
    died: list[Failure] = []
    raised: list[Failure] = []
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    while waiting and (left := end - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            assert isinstance(connection, Connection)  # only connections are waited for
            rank = waiting.pop(connection)
            try:
                answer: _Answer = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                workers[rank].process.join(GRACE_SECONDS)
                code = workers[rank].process.exitcode
                died.append(Failure(rank, time.monotonic() - start, f"the process died, {_exit_text(code)}"))
            else:
                if answer.ok:
                    results[rank] = answer
                else:
                    raised.append(Failure(rank, answer.moment - start, answer.value))
            if died or raised:
                end = min(end, time.monotonic() + GRACE_SECONDS)
    seconds = time.monotonic() - start
    silent = [Failure(rank, seconds, "no answer" + _stacks(workers[rank])) for rank in waiting.values()]
    return results, died + sorted(raised, key=lambda failure: failure.seconds) + silent


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _stacks(worker: _Worker) -> str:
    """The stacks of a worker that does not answer."""
    if worker.process.pid is None:
        return ""
    with suppress(ProcessLookupError):
        os.kill(worker.process.pid, signal.SIGUSR1)
    deadline, stacks = time.monotonic() + 10.0, ""
    while time.monotonic() < deadline and worker.stacks.exists():
        before, stacks = stacks, worker.stacks.read_text()
        if stacks and stacks == before:  # the worker has finished writing
            break
        time.sleep(0.1)
    return f"; its stacks, innermost call first:\n{stacks}" if stacks else ""


@contextmanager
def worker_environment() -> Iterator[None]:
    """The environment that the fork server, and thus the workers, inherit from this process."""
    before = dict(os.environ)
    os.environ.update(WORKER_ENVIRONMENT)
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        ensure_running()
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(connection: Connection, stacks: str, answers: Path | None) -> None:
    """The main loop of a worker: takes calls and answers them, until the pool closes the connection."""
    import torch

    from tests.support.draws import keep_draws
    from tests.support.propagation import keep_answers

    keep_answers(answers)
    keep_draws()
    gc.freeze()  # torch's objects stay alive, and take the garbage collector long
    # A folder of this pool's own, because torch would reuse code compiled from other sources.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(stacks).with_name("inductor"))
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's to handle
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(_answer(message))


def _answer(message: bytes) -> bytes:
    """Run a pickled call; returns its `_Answer`, pickled."""
    try:
        return pickle.dumps(replace(_in_a_world(pickle.loads(message)), threads=_threads()))
    except BaseException:
        return pickle.dumps(_Answer(False, time.monotonic(), traceback.format_exc()))


def _threads() -> int:
    """Number of threads in this process; 1 where the system does not tell."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1


def _in_a_world(call: _Call) -> _Answer:
    """Run a call in a new gloo world."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(call.store, call.ranks),  # type: ignore[attr-defined]
        rank=call.rank,
        world_size=call.ranks,
        timeout=timedelta(seconds=call.timeout + GRACE_SECONDS),  # later than the pool's limit, which shows stacks
    )
    try:
        return _Answer(True, time.monotonic(), call.function(*call.arguments))
    except BaseException:  # take the time now: destroying the group makes the other ranks fail
        return _Answer(False, time.monotonic(), traceback.format_exc())
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # holds meshes of destroyed groups
