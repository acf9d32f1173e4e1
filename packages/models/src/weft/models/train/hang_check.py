"""Whether a run's training step hangs, for `weft check --hangs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.reshard.extension import Recorded

from ..predict.hang_report import Hang
from ..predict.hangs import NoHang
from ..predict.rank_kinds import check_plan
from ..step.record import RecordedStep, SharedRuns
from .config import TrainConfig
from .explanation import Outline
from .memory_check import gpu_count


def check_run(config: TrainConfig, axes: Mapping[str, int]) -> NoHang | Hang:
    """Records the calls of the ranks in a training step of a run, on shapes, and matches the calls between ranks.

    config, axes: as for `Outline.of`. Communication: none.
    Raises ValueError where the plan cannot lay out the model.
    """
    outline = Outline.of(config, axes, "cuda" if gpu_count() else "cpu")

    shared = SharedRuns()

    def record_rank(rank: int, listen: Callable[[Recorded], None]) -> RecordedStep:
        return outline.record_step(rank, "cpu", listen=listen, shared=shared)

    batch = outline.microbatch_rows, outline.batch_shape[1]
    return check_plan(record_rank, outline.mesh, outline.plan, batch=batch)
