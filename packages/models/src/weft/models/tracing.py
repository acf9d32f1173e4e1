"""Names for the parts of a training step, in the trace of torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch.profiler import record_function

Traced = Literal["data", "forward", "backward", "sync", "clip", "optimizer", "copy", "evaluate"]


def traced(part: Traced) -> AbstractContextManager[Any]:
    """What is done in it is "weft.PART" in a trace. Where nothing is profiled it costs next to nothing.

    data: the wait for the rows of the step. sync: the gradients that wait until backward is over. copy: of what a checkpoint holds.
    """
    is_profiling = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(f"weft.{part}") if is_profiling else nullcontext()
