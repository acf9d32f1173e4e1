"""Parallel plans, and `parallelize`, which lays a model out on a mesh by a plan."""

from .batch import Batch, lay_out_batch
from .lora import lora, merge_lora, without_adapters
from .parallelize import parallelize
from .plan import ExpertPlan, ParallelPlan
from .styles import (
    ColwiseParallel,
    ExpertParallel,
    PositionParallel,
    PrepareInput,
    PrepareOutput,
    RowwiseParallel,
    VocabParallel,
)

__all__ = [
    "Batch",
    "ColwiseParallel",
    "ExpertParallel",
    "ExpertPlan",
    "ParallelPlan",
    "PositionParallel",
    "PrepareInput",
    "PrepareOutput",
    "RowwiseParallel",
    "VocabParallel",
    "lay_out_batch",
    "lora",
    "merge_lora",
    "parallelize",
    "without_adapters",
]
