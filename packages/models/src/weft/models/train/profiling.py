"""A profile of a few steps, one trace a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import profile, schedule

from .config import PROFILED_FROM, PROFILED_STEPS


@contextmanager
def profiled(folder: Path | None, rank: int) -> Iterator[Callable[[], None]]:
    """Gives what to call after each step; the trace is written to FOLDER/rank-N.json, for chrome://tracing or Perfetto.

    Without a folder nothing is profiled.
    """
    if folder is None:
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)

    def save(found: torch.profiler.profile) -> None:
        found.export_chrome_trace(str(folder / f"rank-{rank}.json"))

    # The first steps begin with what is done once; the profiler itself is slow in the step before those that count.
    steps = schedule(wait=PROFILED_FROM - 2, warmup=1, active=PROFILED_STEPS, repeat=1)
    # acc_events: there is one cycle, whose events are kept in any case; without it torch 2.11 warns that others are not.
    with profile(schedule=steps, on_trace_ready=save, acc_events=True) as profiler:
        yield profiler.step
