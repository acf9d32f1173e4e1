"""Agreements among the ranks of a run.

`meet`: the rendezvous under torchrun, srun or mpirun, also after a restart. `_join_world` in launch.py calls it before
initializing the process group. Processes that `launch` starts itself do not need it.
`RollCall`: names silent ranks after a timeout. `train` calls it after a collective has timed out.
`StopVote`: stops all ranks after the same step, on SIGTERM or Ctrl-C. The training loop makes one for each run.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous
from weft.reshard.extension import format_ranks

NAME = "weft/name of the attempt"  # key of the name drawn by rank 0
LOOK_SECONDS = 0.02  # between two looks at the store in `store_of_attempt`
SIGNALS = (signal.SIGINT, signal.SIGTERM)

EVERY_SECONDS = 1.0  # between two looks at the store for the question of a roll call
ANSWER_SECONDS = 5 * EVERY_SECONDS  # for all ranks to answer
STORE_SECONDS = 2 * EVERY_SECONDS  # for the store itself to respond
QUESTION = "roll call"  # key in the store: how many questions were asked


class Unanswered(RuntimeError):
    """The outcome of a roll call after a collective has timed out. Made by `RollCall.call`, raised by `train`.

    The message names the silent ranks. If all ranks answered, the message says where they wait. If the store does not
    respond or is gone, the message names the store's host.
    """

    def __init__(self, message: str, is_printed_here: bool) -> None:
        """is_printed_here: whether this rank prints the message.

        One rank does; every rank if the store does not respond; none if the store is gone.
        """
        super().__init__(message)
        self.is_printed_here = is_printed_here


class RollCall:
    """Context with a thread that answers each roll call of the run with this rank's activity.

    Questions and answers go through the world's store. A stopped process does not answer.
    activity: returns this rank's activity in words, as "step 3, forward".
    store_host: the store's host process in words. While the host is stopped, the store answers nobody.
    Communication: a read of the store per second, beside the run.
    """

    def __init__(self, activity: Callable[[], str], store_host: str) -> None:
        self._activity, self._store, self._store_host = activity, _get_default_store(), store_host
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)

    def __enter__(self) -> RollCall:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(STORE_SECONDS)

    def call(self, seconds: float) -> Unanswered:
        """Ask all ranks for their activity; return an error naming the silent ranks.

        If all ranks answer, the error names the ranks whose activity differs from this rank's.
        seconds: the collective's timeout, quoted in the message.
        Returns within ANSWER_SECONDS + STORE_SECONDS. If the store does not respond, every rank prints, because
        without the store the ranks cannot choose one. If the store is gone, the host has ended and printed the reason.
        """
        outcomes: list[Unanswered] = []

        def ask() -> None:
            try:
                outcomes.append(self._ask(seconds))
            except RuntimeError:
                outcomes.append(Unanswered(f"{self._store_host} has ended", False))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(ANSWER_SECONDS + STORE_SECONDS)
        if outcomes:
            return outcomes[0]
        return Unanswered(
            f"{self._store_host} did not answer for {seconds:g} s, while rank {self._rank} waited in "
            f"{self._activity()}",
            True,
        )

    def _ask(self, seconds: float) -> Unanswered:
        """Ask through the store; see `call`."""
        number = self._store.add(QUESTION, 1)
        is_printed_here = number == 1
        end = time.monotonic() + ANSWER_SECONDS
        while len(answers := self._answers(number)) < self._ranks and time.monotonic() < end:
            time.sleep(0.1)
        silent = [rank for rank in range(self._ranks) if rank not in answers]
        own_activity = self._activity()
        if silent:
            return Unanswered(
                f"{format_ranks(silent)} did not answer for {seconds:g} s, while the others waited in {own_activity}",
                is_printed_here,
            )
        differing = [rank for rank, activity in answers.items() if activity != own_activity]
        activities = "; ".join(f"rank {rank} is in {answers[rank]}" for rank in differing)
        return Unanswered(
            f"a collective did not finish in {seconds:g} s: this rank waits in {own_activity}; "
            f"{activities or 'all other ranks do too'}",
            is_printed_here,
        )

    def _answers(self, number: int) -> dict[int, str]:
        """The answers received by now to a question, by rank."""
        keys = {rank: f"{QUESTION}/{number}/{rank}" for rank in range(self._ranks)}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def _answer(self) -> None:
        """The thread of each rank: wait for questions, and write this rank's activity into the store."""
        answered = 0
        with suppress(RuntimeError):  # the store is gone because the run has ended
            while True:
                for number in range(answered, self._store.add(QUESTION, 0)):
                    answered = number + 1
                    self._store.set(f"{QUESTION}/{answered}/{self._rank}", self._activity())
                if self._ended.wait(EVERY_SECONDS):
                    return


def is_silence(error: RuntimeError) -> bool:
    """Whether a collective failed because some rank did not join in time."""
    # If an earlier collective on the same connection timed out, gloo says "Application timeout".
    return any(word in str(error) for word in ("imed out", "imeout"))


def meet(timeout: float) -> dict[str, Any]:
    """The arguments store, rank and world_size for `init_process_group`.

    Taken from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    timeout: seconds to wait for each rank. Communication: the ranks meet in the store.
    Raises RuntimeError if a rank is missing after `timeout` seconds.
    """
    store, rank, ranks = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
    return {"store": store_of_attempt(store, rank, ranks, timeout), "rank": rank, "world_size": ranks}


def describe_store_host() -> str:
    """The host process of the ranks' store, in words for an error: "torchrun's agent" or "rank 0".

    Decided as torch does, by TORCHELASTIC_USE_AGENT_STORE. Also "rank 0" in runs started by `launch`, where the store
    is a file without a host process.
    """
    return "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


def store_of_attempt(store: Store, rank: int, ranks: int, timeout: float) -> Store:
    """A part of the store without keys of earlier attempts of this run.

    torchrun's agent keeps one store over all restarts (https://github.com/pytorch/pytorch/issues/135712). In a shared
    part, restarted processes would read keys of dead processes, for example addresses. The agent's restart count
    cannot name the part: a restarted agent counts from 0 again.
    Rank 0 therefore draws a random name for the part and stores the name under the key NAME. Another rank may read
    NAME too early and get an earlier attempt's name. To find out, the rank stores a random word under the key
    "<name>/here/<rank>". Rank 0 copies the word to "<name>/heard/<rank>", but only under the name it has drawn. Until
    the copy appears, the rank reads NAME again and stores its word under the name now found.
    Raises RuntimeError if rank 0 does not answer within `timeout` seconds. On rank 0 the store's own timeout applies;
    the error names all ranks that did not come.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        store.set(NAME, name)
        for peer in range(1, ranks):
            try:
                word = store.get(f"{name}/here/{peer}").decode()
            except dist.DistError as error:
                missing = [each for each in range(peer, ranks) if not store.check([f"{name}/here/{each}"])]
                raise RuntimeError(
                    f"{format_ranks(missing)} of {ranks} did not come to the start of the run within {timeout:g} s; "
                    f"see the output of these processes"
                ) from error
            store.set(f"{name}/heard/{peer}", word)
        return PrefixStore(name, store)
    word, end = uuid.uuid4().hex, time.monotonic() + timeout
    while time.monotonic() < end:
        name = store.get(NAME).decode()
        store.set(f"{name}/here/{rank}", word)
        answer = f"{name}/heard/{rank}"
        if store.check([answer]) and store.get(answer).decode() == word:
            return PrefixStore(name, store)
        time.sleep(LOOK_SECONDS)
    raise RuntimeError(f"rank 0 has not answered rank {rank} for {timeout:g} s at the start of the run")


class StopVote:
    """A vote in every step on whether to stop the run.

    `begin` sends whether this rank has received a signal; `end` returns the result.
    """

    def __init__(self, timeout: float) -> None:
        """timeout: seconds to wait for a rank. Communication: a new process group of all ranks."""
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._signal = 0
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    @contextmanager
    def record_signals(self) -> Iterator[None]:
        """Context in which SIGTERM and SIGINT are only recorded for the next vote."""
        before = {each: signal.signal(each, self._on_signal) for each in SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def begin(self) -> None:
        """Start the vote. Communication: an all-reduce of a byte, concurrent with the step."""
        vote = torch.tensor([self._signal], dtype=torch.uint8)
        work = dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._pending = vote, work

    def end(self) -> int:
        """Finish the vote; returns the signal received by any rank before `begin`, or 0. The same on every rank.

        Of different signals, the larger number.
        """
        assert self._pending is not None, "a vote was begun"
        vote, work = self._pending
        work.wait()
        return int(vote)

    def _on_signal(self, signum: int, frame: object) -> None:
        """Signal handler: record the signal."""
        self._signal = signum
