"""How a Llama is laid out."""

from __future__ import annotations

from ..parallel.plan import ParallelPlan
from ..parallel.styles import ColwiseParallel, RowwiseParallel, VocabParallel

PLAN = ParallelPlan(
    tensor={
        "embed_tokens": VocabParallel(),
        "layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "layers.*.self_attn.o_proj": RowwiseParallel(),
        "layers.*.mlp.gate_proj": ColwiseParallel(),
        "layers.*.mlp.up_proj": ColwiseParallel(),
        "layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(),
    }
)
