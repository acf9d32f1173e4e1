"""GPT-2's default parallel plan. The learned positions are replicated."""

from __future__ import annotations

from ..parallel.plan import ParallelPlan
from ..parallel.styles import ColwiseParallel, PositionParallel, RowwiseParallel, VocabParallel

PLAN = ParallelPlan(
    tensor={
        "wte": VocabParallel(),
        "wpe": PositionParallel(),
        "h.*.attn.[qkv]_proj": ColwiseParallel(),
        "h.*.attn.c_proj": RowwiseParallel(),
        "h.*.mlp.c_fc": ColwiseParallel(),
        "h.*.mlp.c_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(),
    },
    blocks=("h.*",),
)
