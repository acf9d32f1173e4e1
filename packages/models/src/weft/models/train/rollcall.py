"""Which rank does not answer: asked when one was waited for in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

EVERY_SECONDS = 1.0  # between two looks whether somebody asks
ANSWER_SECONDS = 5 * EVERY_SECONDS
STORE_SECONDS = 2 * EVERY_SECONDS  # for what the store itself takes to answer
ASKED, CALLER = "roll call", "roll call/caller"


class Unanswered(RuntimeError):
    """Ranks do not answer; the message names them. is_told: whether this rank is the one to say it."""

    def __init__(self, message: str, is_told: bool) -> None:
        super().__init__(message)
        self.is_told = is_told


class RollCall:
    """While it is entered a thread of each rank says, when it is asked, what the rank is doing. One that was stopped does not.

    doing: gives it, in words. keeper: in whose process the store is; where that was stopped the store answers nobody.
    Communication: a look into the world's store, a second, beside the run.
    """

    def __init__(self, doing: Callable[[], str], keeper: str) -> None:
        self._doing, self._store, self._keeper = doing, _get_default_store(), keeper
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)

    def __enter__(self) -> RollCall:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(STORE_SECONDS)

    def call(self, seconds: float) -> Unanswered:
        """What is to be said after `seconds` of waiting in vain: the ranks that do not answer, or that are behind the others.

        It returns within ANSWER_SECONDS + STORE_SECONDS. Where the store does not answer, each rank is to say so: none knows
        what the others do. Where it is gone its process has ended, and has said why.
        """
        found: list[Unanswered] = []

        def ask() -> None:
            try:
                found.append(self._ask(seconds))
            except RuntimeError:
                found.append(Unanswered(f"{self._keeper} has ended", False))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(ANSWER_SECONDS + STORE_SECONDS)
        if found:
            return found[0]
        return Unanswered(
            f"{self._keeper} answered no more for {seconds:g} s, while rank {self._rank} waited in {self._doing()}",
            True,
        )

    def _ask(self, seconds: float) -> Unanswered:
        is_told = self._store.add(CALLER, 1) == 1
        self._store.set(ASKED, "")
        end = time.monotonic() + ANSWER_SECONDS
        while len(answers := self._answers()) < self._ranks and time.monotonic() < end:
            time.sleep(0.1)
        silent = [rank for rank in range(self._ranks) if rank not in answers]
        here = self._doing()
        if silent:
            return Unanswered(
                f"{named_ranks(silent)} answered no more for {seconds:g} s, while the others waited in {here}", is_told
            )
        behind = [rank for rank, doing in answers.items() if doing != here]
        where = "; ".join(f"rank {rank} is in {answers[rank]}" for rank in behind)
        return Unanswered(
            f"a collective was not done in {seconds:g} s: this rank waits in {here}; {where or 'so do all others'}",
            is_told,
        )

    def _answers(self) -> dict[int, str]:
        keys = {rank: f"{ASKED}/{rank}" for rank in range(self._ranks)}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def _answer(self) -> None:
        with suppress(RuntimeError):  # the store went with the run
            while not self._store.check([ASKED]):
                if self._over.wait(EVERY_SECONDS):
                    return
            self._store.set(f"{ASKED}/{self._rank}", self._doing())


def is_silence(error: RuntimeError) -> bool:
    """Whether a collective failed since others did not come in time."""
    # Of a collective on whose connection another one has timed out gloo says "Application timeout".
    return any(word in str(error) for word in ("imed out", "imeout"))


def named_ranks(ranks: list[int]) -> str:
    """In words: "rank 3", "ranks 0, 1"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
