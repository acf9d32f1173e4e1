"""Names for the parts of a training step in traces of torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch.profiler import record_function

Traced = Literal["data", "forward", "backward", "sync", "clip", "optimizer", "copy", "evaluate"]


def traced(part: Traced) -> AbstractContextManager[Any]:
    """A context whose work appears as "weft.PART" in a trace. Costs next to nothing without a profiler.

    data: waiting for the step's rows. sync: gradient communication after backward. copy: copying tensors for a
        checkpoint.
    """
    is_profiling = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(f"weft.{part}") if is_profiling else nullcontext()
