"""Predictions of published steps: Weft's program is traced, changed by the facts of a row's stack, and priced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from weft.models import Llama
from weft.models.gpt.model import GPT
from weft.models.llama.config import LlamaConfig
from weft.models.parallel.lora import lora
from weft.models.parallel.parallelize import own_plan
from weft.models.parallel.plan import ParallelPlan
from weft.models.predict.chip import load_chip
from weft.models.predict.estimate import Estimate, estimate
from weft.models.predict.events import Trace
from weft.models.predict.memory import MemoryParts, compose, memory_parts, stage_peaks
from weft.models.predict.pipeline_time import even_stages
from weft.models.predict.trace import trace_step
from weft.models.schedules.pipeline_plan import PipelinePlan
from weft.models.step.record import StepShape

from benchmarks.published.rows import GIB, Row, flops_of_a_token
from benchmarks.published.stacks import Program, stacks

BFLOAT16 = 2  # bytes


def predict(row: Row) -> Estimate:
    """The time of a row's step."""
    chip = load_chip(row.chip)
    program = program_of(row)
    if program.stack.attention is not None:
        forward, backward = program.stack.attention
        chip = replace(chip, attention_reachable={"forward": forward, "backward": backward})
    schedule = None
    if row.schedule:
        schedule = pipeline_of(row).make_schedule(row.axis("pp"), row.microbatches)
    sizes = dict(zip(row.mesh.axis_names, row.mesh.shape, strict=True))
    return estimate(
        program.of(trace_of(row)),
        chip=chip,
        mesh_sizes=sizes,
        tokens=row.rows * row.tokens,
        flops=row.rows * row.tokens * flops_of_a_token(row.model, row.tokens),
        schedule=schedule,
        stages=row.stages,
        compiled=program.stack.compiled,
    )


def activations_gib(row: Row) -> float:
    """Activations saved for backward on the first rank of the pipeline, in GiB.

    The activations of Weft's program, and the further ones of the row's stack.
    """
    stack = stacks()[row.stack]
    parts = _memory_parts(replace(row, recompute="none"))
    tensor = row.axis("tp")
    tokens = row.rows * row.tokens // (row.axis("dp") * row.axis("cp") * row.microbatches)
    elements = tokens * row.model.hidden_size
    whole, split = stack.saved
    more = elements * (whole / (tensor if row.sequence else 1) + split / tensor)
    if row.sequence and tensor > 1 and stack.regathers:
        more -= elements * 2 * BFLOAT16  # Weft keeps the gathered inputs of a block's two column-parallel layers
    if row.recompute == "none":
        more += stack.saved_scores * tokens * row.tokens * row.model.num_heads / tensor
    blocks, in_flight = row.model.num_layers / row.axis("pp"), 1.0
    if row.schedule:
        schedule = pipeline_of(row).make_schedule(row.axis("pp"), row.microbatches)
        in_flight = schedule.in_flight()[0] / len(schedule.stages[0])
    return blocks * in_flight * (parts.saved.per_block + more) / GIB


def memory_gib(row: Row) -> float:
    """Peak memory of the rank that holds most, in GiB, as the row's allocator reserves it."""
    stack = stacks()[row.stack]
    program = program_of(row)
    parts = _memory_parts(row)
    peaks = [compose(parts, blocks=row.model.num_layers)]
    if row.schedule:
        schedule = pipeline_of(row).make_schedule(row.axis("pp"), row.microbatches)
        peaks = stage_peaks(parts, schedule, row.stages or even_stages(row.model.num_layers, schedule.num_stages))
    tokens = row.rows * row.tokens // (row.axis("dp") * row.axis("cp") * row.microbatches)
    dropped = tokens * _dropped_columns(row) * BFLOAT16 * row.model.num_layers if row.recompute == "alternate" else 0
    found = []
    for peak in peaks:
        # Parameters, their gradients and states are in float32.
        held = peak.nbytes + peak.parameters + peak.states + peak.gradients - dropped
        if stack.gradients_apart:
            held += max(0, 2 * (peak.parameters - peak.gradients))
        if not row.schedule:  # FSDP2's root group, embedding and head, stays gathered
            tables = 2 * BFLOAT16 * row.model.vocab_size * row.model.hidden_size // row.axis("tp")
            held += max(0, tables - peak.gathered)
        elif stack.stage_gradients:
            held += max(0.0, stack.stage_gradients / BFLOAT16 * peak.gathered - peak.buckets)
        if peak.logits and stack.logit_memory is not None:
            held += max(0.0, stack.logit_memory * program.logits - peak.logits)
        found.append(held)
    return max(found) * stack.reserved / GIB


def _dropped_columns(row: Row) -> int:
    """Columns of a block's saved activations: Weft's under selective recomputation, minus torchtitan's.

    Weft saves the products for keys, attention's output and the up projection; torchtitan saves attention's result and
    the product for the MLP's output.
    """
    model: Any = row.model
    width, keys = model.head_dim * model.num_heads, model.head_dim * model.num_kv_heads
    return int(keys + model.intermediate_size - width) // row.axis("tp")


def _memory_parts(row: Row) -> MemoryParts:
    model = _model_of(row)
    shape = StepShape(batch=(row.rows, row.tokens), microbatches=row.microbatches, reduce_dtype=torch.float32)
    return memory_parts(model, row.mesh, plan_of(row, own_plan(model)), shape, clip_norm=1.0)


def program_of(row: Row) -> Program:
    """The differences between a row's program and Weft's."""
    tokens = row.rows * row.tokens // (row.axis("dp") * row.axis("cp") * row.microbatches)
    return Program(
        stack=stacks()[row.stack],
        float8=row.products == "float8",
        alternate=row.recompute == "alternate",
        hidden_size=row.model.hidden_size,
        context_parallel=row.axis("cp"),
        tensor_parallel=row.axis("tp"),
        logits=tokens * row.model.vocab_size // row.axis("tp"),
    )


def pipeline_of(row: Row) -> PipelinePlan:
    """The plan of a row's stages."""
    assert row.schedule
    chunks = row.chunks if row.schedule == "interleaved" else None
    return PipelinePlan(schedule=row.schedule, microbatches=row.microbatches, chunks=chunks)


def plan_of(row: Row, own: ParallelPlan) -> ParallelPlan:
    """The plan of a row, from the plan of its model."""
    return replace(
        own,
        sequence=row.sequence and row.axis("tp") > 1,
        context="all_gather" if row.axis("cp") > 1 else None,
        pipeline=pipeline_of(row) if row.schedule else None,
        recompute="selective" if row.recompute == "alternate" else row.recompute,
        zero=row.zero,
    )


def trace_of(row: Row) -> Trace:
    """A rank's step of the row in Weft's own program."""
    model = _model_of(row)
    shape = StepShape(batch=(row.rows, row.tokens), microbatches=row.microbatches, reduce_dtype=torch.float32)
    return trace_step(model, row.mesh, plan_of(row, own_plan(model)), shape, clip_norm=1.0)


def _model_of(row: Row) -> nn.Module:
    family: type[nn.Module] = Llama if isinstance(row.model, LlamaConfig) else GPT
    with torch.device("meta"):
        model = family(row.model).to(row.dtype)
        if row.low_rank:
            lora(model, row.low_rank, 2.0 * row.low_rank, ("*_proj",), dtype=row.dtype)
    return model
