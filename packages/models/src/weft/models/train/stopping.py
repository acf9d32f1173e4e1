"""How a run ends when somebody asks for it, by SIGTERM or Ctrl-C: on every rank after the same step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopVote:
    """Whether any rank was told to end. Each says at the beginning of a step what it has heard, and all know at its end."""

    def __init__(self, timeout: float) -> None:
        """timeout: seconds that a rank is waited for. Communication: a process group of all ranks."""
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._heard = 0
        self._voting: tuple[torch.Tensor, dist.Work] | None = None

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """Within it the signals are noted, and stop nothing by themselves."""
        before = {each: signal.signal(each, self._hear) for each in SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def begin(self) -> None:
        """Communication: an all-reduce of a byte, which goes on beside the step."""
        heard = torch.tensor([self._heard], dtype=torch.uint8)
        work = dist.all_reduce(heard, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._voting = heard, work

    def end(self) -> int:
        """The signal that a rank had heard when the step began, 0 for none; the same on every rank."""
        assert self._voting is not None, "a vote was begun"
        heard, work = self._voting
        work.wait()
        return int(heard)

    def _hear(self, signum: int, frame: object) -> None:
        self._heard = signum
