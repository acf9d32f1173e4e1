"""Parallel plans and what carries them out."""

from .batch import Batch, lay_out_batch
from .parallelize import parallelize
from .pipeline.plan import PipelinePlan
from .plan import ParallelPlan
from .styles import ColwiseParallel, PositionParallel, PrepareInput, PrepareOutput, RowwiseParallel, VocabParallel

__all__ = [
    "Batch",
    "ColwiseParallel",
    "ParallelPlan",
    "PipelinePlan",
    "PositionParallel",
    "PrepareInput",
    "PrepareOutput",
    "RowwiseParallel",
    "VocabParallel",
    "lay_out_batch",
    "parallelize",
]
