"""How a Qwen is laid out: what no pattern names, as the norms of query and key heads, is whole on every rank."""

from __future__ import annotations

from ..decoder import TENSOR_STYLES
from ..parallel.plan import ParallelPlan

PLAN = ParallelPlan(tensor=TENSOR_STYLES)
