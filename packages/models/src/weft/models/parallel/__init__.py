"""Parallel plans and what carries them out."""

from .parallelize import parallelize
from .plan import ParallelPlan
from .styles import ColwiseParallel, RowwiseParallel, VocabParallel

__all__ = ["ColwiseParallel", "ParallelPlan", "RowwiseParallel", "VocabParallel", "parallelize"]
