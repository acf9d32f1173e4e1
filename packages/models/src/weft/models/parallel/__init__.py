"""Parallel plans and what carries them out."""

from .parallelize import parallelize
from .plan import ParallelPlan
from .styles import ColwiseParallel, PrepareInput, PrepareOutput, RowwiseParallel, VocabParallel

__all__ = [
    "ColwiseParallel",
    "ParallelPlan",
    "PrepareInput",
    "PrepareOutput",
    "RowwiseParallel",
    "VocabParallel",
    "parallelize",
]
