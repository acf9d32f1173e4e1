"""Parallel plans and what carries them out."""

from .parallelize import parallelize
from .plan import ParallelPlan
from .styles import ColwiseParallel, PositionParallel, PrepareInput, PrepareOutput, RowwiseParallel, VocabParallel

__all__ = [
    "ColwiseParallel",
    "ParallelPlan",
    "PositionParallel",
    "PrepareInput",
    "PrepareOutput",
    "RowwiseParallel",
    "VocabParallel",
    "parallelize",
]
