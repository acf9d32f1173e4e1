"""Stop a run on SIGTERM or Ctrl-C after the same step on every rank.

The training loop uses a single `StopVote` per run.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopVote:
    """A vote in every step on whether to stop the run.

    `begin` sends whether this rank has received a signal; `end` returns the result.
    """

    def __init__(self, timeout: float) -> None:
        """timeout: seconds to wait for a rank. Communication: a new process group of all ranks."""
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._heard = 0
        self._voting: tuple[torch.Tensor, dist.Work] | None = None

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """Context in which SIGTERM and SIGINT are only recorded for the next vote."""
        before = {each: signal.signal(each, self._hear) for each in SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def begin(self) -> None:
        """Start the vote. Communication: an all-reduce of a byte, concurrent with the step."""
        heard = torch.tensor([self._heard], dtype=torch.uint8)
        work = dist.all_reduce(heard, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._voting = heard, work

    def end(self) -> int:
        """Finish the vote: the signal received by any rank before the step began, or 0; the same on every rank."""
        assert self._voting is not None, "a vote was begun"
        heard, work = self._voting
        work.wait()
        return int(heard)

    def _hear(self, signum: int, frame: object) -> None:
        """Signal handler: record the signal."""
        self._heard = signum
