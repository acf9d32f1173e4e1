"""Qwen's default parallel plan. Parameters outside the patterns, like the norms of heads, are replicated."""

from __future__ import annotations

from ..decoder import TENSOR_STYLES
from ..parallel.plan import ParallelPlan

PLAN = ParallelPlan(tensor=TENSOR_STYLES)
