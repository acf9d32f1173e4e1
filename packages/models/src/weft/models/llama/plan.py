"""Llama's default parallel plan."""

from __future__ import annotations

from ..decoder import TENSOR_STYLES
from ..parallel.plan import ParallelPlan

PLAN = ParallelPlan(tensor=TENSOR_STYLES)
