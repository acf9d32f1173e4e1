"""`StandardStep`: a training step of a small Llama, which `measure` times and predicts from the step's trace.

`host_seconds_of`, `collective_host_seconds_of`: the host's share of the step's time. `drift_of`: how far ranks drift
apart between collectives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from weft import kernels
from weft.mesh import ProcessMesh
from weft.reshard import GradientSync

from ..config import ModelConfig
from ..families import FAMILIES, make_model
from ..initialization import initialize
from ..parallel import parallelize
from ..parallel.pipeline.step import Microbatch
from ..step.find_gradients import find_gradients
from ..step.record import StepShape
from .chip import Chip
from .events import Compute, Start, Trace
from .price import transfer
from .trace import trace_step


@dataclass(frozen=True, slots=True)
class StepSize:
    """The model and batch of a `StandardStep`."""

    config: ModelConfig
    rows: int
    tokens: int


_CONFIG: Any = FAMILIES["llama"].config_class
SMALL = StepSize(
    _CONFIG(
        vocab_size=257,
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        intermediate_size=192,
        max_seq_len=128,
    ),
    rows=1,
    tokens=64,
)
LARGE = StepSize(
    _CONFIG(
        vocab_size=2048,
        hidden_size=256,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        intermediate_size=768,
        max_seq_len=256,
    ),
    rows=2,
    tokens=256,
)
DIVIDED = StepSize(  # over two ranks, with a collective for every few ops
    _CONFIG(
        vocab_size=257,
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=384,
        max_seq_len=128,
    ),
    rows=4,
    tokens=128,
)
CLIP_NORM = 1.0


class StandardStep:
    """A training step on the ranks `rank` to `rank` + `tp` - 1: gradients, norm, and AdamW. Used by `measure_machine`.

    Communication, with `tp` above 1: `run` as `find_gradients`.
    """

    def __init__(self, size: StepSize, device: torch.device, rank: int, *, tp: int = 1) -> None:
        self._size, self._tp = size, tp
        with torch.device("meta"):
            model: Any = make_model(size.config)
        mesh = ProcessMesh.grid(first_rank=rank, dp=1, tp=tp)
        self._model = parallelize(model, mesh, model.parallel_plan()).to_empty(device=device)
        initialize(self._model, seed=0)
        self._sync = GradientSync(self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        shape = size.rows, size.tokens
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._batch = Microbatch(args=(tokens,), targets=torch.zeros(shape, dtype=torch.int64, device=device))

    def run(self) -> None:
        find_gradients(self._model, kernels.cross_entropy, [self._batch], self._sync, clip_norm=CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def trace(self) -> Trace:
        return trace_of(self._size, self._tp)

    def predicted_seconds(self, chip: Chip) -> float:
        """Seconds of the step: all ops by the chip's rates, plus the host's time for each op."""
        trace = self.trace()
        return _seconds_of_ops(trace, chip) + chip.host_seconds * _launches(trace)


def host_seconds_of(trace: Trace, seconds: float, chip: Chip) -> float:
    """Seconds of the host for an op of torch: what the ops leave of a step's `seconds`, divided by the number of ops.

    seconds: measured. 0 where the ops alone take longer.
    """
    return max(0.0, (seconds - _seconds_of_ops(trace, chip)) / _launches(trace))


def collective_host_seconds_of(trace: Trace, seconds: float, chip: Chip) -> float:
    """Seconds of the computing thread for a collective: what the ops leave of a step's `seconds`, by collective.

    seconds: measured, of the thread on a core, without waits. The thread issues the collectives, and ops on sharded
    tensors take longer to start. Both count. 0 where the ops alone take longer.
    """
    count = sum(times for _, times in _collectives(trace))
    of_ops = chip.crowding * (_seconds_of_ops(trace, chip) + chip.host_seconds * _launches(trace))
    return max(0.0, (seconds - of_ops) / count)


def drift_of(trace: Trace, busy: float, waiting: float, chip: Chip) -> float:
    """`Chip.drift` by a step: how far ranks drift apart between two collectives, by the square root of the time.

    Each rank waits at a collective for the rank that comes last.
    busy: seconds of the step in which the computing thread runs. waiting: seconds in which the thread waits for
    collectives. The collectives' own seconds are subtracted from `waiting`; 0 where these alone take longer.
    """
    collectives = _collectives(trace)
    count = sum(times for _, times in collectives)
    own = sum(times * transfer(event, chip).seconds for event, times in collectives)
    return max(0.0, (waiting - own) / count) / math.sqrt(busy / count)


@cache
def trace_of(size: StepSize, tp: int = 1) -> Trace:
    """The trace of a `StandardStep` on rank 0; made once for each size and `tp`, for `StandardStep.trace`."""
    with torch.device("meta"):
        model: Any = make_model(size.config)
    shape = StepShape(batch=(size.rows, size.tokens))
    return trace_step(model, ProcessMesh.grid(dp=1, tp=tp), model.parallel_plan(), shape, clip_norm=CLIP_NORM)


def _work(trace: Trace) -> list[tuple[Compute, int]]:
    """(op, number of calls in the step) for each op of the trace."""
    return [
        (event, trace.count(segment))
        for segment in trace.segments
        for event in segment.events
        if isinstance(event, Compute)
    ]


def _collectives(trace: Trace) -> list[tuple[Start, int]]:
    """(collective of several ranks, number of calls in the step) for each collective of the trace."""
    return [
        (event, trace.count(segment))
        for segment in trace.segments
        for event in segment.events
        if isinstance(event, Start) and event.size > 1
    ]


def _launches(trace: Trace) -> int:
    return sum(event.num_launches * times for event, times in _work(trace))


def _seconds_of_ops(trace: Trace, chip: Chip) -> float:
    total = 0.0
    for event, times in _work(trace):
        measured = chip.measured_seconds(event.name, event.part, event.dtype, event.nbytes, event.flops, event.sizes)
        total += times * (event.nbytes / chip.reachable_bandwidth if measured is None else measured)
    return total
