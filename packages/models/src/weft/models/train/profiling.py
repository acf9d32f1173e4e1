"""torch profiler traces of a few steps, a file per rank (`--profile`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import profile, schedule

from .config import PROFILED_FROM, PROFILED_STEPS


@contextmanager
def profiled(folder: Path | None, rank: int) -> Iterator[Callable[[], None]]:
    """Context manager whose value is a function to call after each step.

    The trace of steps 3 to 5 is written to FOLDER/rank-N.json, for chrome://tracing or Perfetto. Nothing is profiled
    if `folder` is None.
    """
    if folder is None:
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)

    def save(found: torch.profiler.profile) -> None:
        found.export_chrome_trace(str(folder / f"rank-{rank}.json"))

    # Steps 1 and 2 include warm-up work. The profiler itself slows down the step before the recorded ones.
    steps = schedule(wait=PROFILED_FROM - 2, warmup=1, active=PROFILED_STEPS, repeat=1)
    # acc_events keeps the events of all cycles. There is a single cycle, but without the flag torch 2.11 warns.
    with profile(schedule=steps, on_trace_ready=save, acc_events=True) as profiler:
        yield profiler.step
