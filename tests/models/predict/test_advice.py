"""The changes that `advise` finds: those of pricing every change, with fewer runs on shapes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from weft.models import Llama, LlamaConfig
from weft.models.predict.advice import MOST, TRIED, WORTH, advise
from weft.models.predict.chip import load_chip
from weft.models.predict.events import Trace
from weft.models.predict.find_plans import check_stages, parameters_of, traced_flops
from weft.models.predict.neighbors import for_memory, neighbors
from weft.models.predict.plan_memory import PlanMemory
from weft.models.predict.plan_prices import PlanPrices
from weft.models.predict.plans import Candidate
from weft.models.predict.stage_traces import StageTraces
from weft.models.predict.timeline import PARTS
from weft.models.predict.trace import trace_step
from weft.models.predict.workload import Workload
from weft.models.step.alike import block_names, copy_blocks

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=512, intermediate_size=1024, num_layers=8, num_heads=8, num_kv_heads=8,
    max_seq_len=1024,
)  # fmt: skip
STAGED = Candidate(pp=4, dp=2, schedule="1f1b", microbatches=4, recompute="full")


def prices_of(*, processes: int, limit: float = 1.0) -> PlanPrices:
    """Prices of a small model's plans on h100. limit: share of the memory of an h100."""
    with torch.device("meta"):
        model = Llama(CONFIG)
    workload, chip = (
        Workload(model=model, rows=16, tokens=1024, dtype=torch.bfloat16, is_compiled=True),
        load_chip("h100"),
    )
    return PlanPrices(
        workload=workload,
        chip=chip,
        processes=processes,
        limit=round(chip.memory_bytes * limit),
        flops=traced_flops(workload),
        memory=PlanMemory(workload=workload, parameters=parameters_of(workload)),
        stages=StageTraces(workload=workload),
    )


def check(candidate: Candidate) -> None:
    check_stages(candidate, CONFIG.num_layers)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("candidate", "limit"),
    [
        pytest.param(STAGED, 1.0, id="stages"),
        pytest.param(Candidate(dp=2, tp=4, zero=1, sequence=True, microbatches=2), 1.0, id="tp"),
        pytest.param(STAGED, 0.001, id="does-not-fit"),
    ],
)
def test_bounds_leave_out_no_change_that_pricing_all_would_find(candidate: Candidate, limit: float) -> None:
    prices = prices_of(processes=8, limit=limit)
    estimate, nbytes = prices.estimate(candidate), prices.memory.peak(candidate)
    parts = {str(part): seconds for part, seconds in estimate.parts.items()}
    traced = len(prices.workload.runs.results())
    found = advise(prices, candidate, check, seconds=estimate.seconds, parts=parts, memory_bytes=nbytes)
    traced = len(prices.workload.runs.results()) - traced
    fits = nbytes <= prices.limit
    assert fits == (limit == 1.0)
    every = prices_of(processes=8, limit=limit)
    expected = []
    for change in neighbors(candidate, parts)[:TRIED] if fits else for_memory(candidate):
        try:
            check(change)
        except ValueError:
            continue
        seconds = every.price(change)[0]
        faster = seconds <= estimate.seconds * (1 - WORTH) or not fits
        if change != candidate and seconds < math.inf and faster and every.fits(change):
            expected.append((seconds, change.complexity, change))
    assert [(each.seconds, each.candidate) for each in found] == [
        (seconds, change) for seconds, _, change in sorted(expected)[:MOST]
    ]
    assert all(each.memory_bytes == every.memory.peak(each.candidate) for each in found)
    assert all(each.is_compiled for each in found)


@pytest.mark.exhaustive
def test_a_change_with_a_bound_above_the_step_is_not_traced() -> None:
    prices, parts = prices_of(processes=8), dict.fromkeys(PARTS, 0.0) | {"communication": 1.0, "products": 1.0}
    slower, without = replace(STAGED, microbatches=2), replace(STAGED, recompute="none")
    assert {slower, without} <= set(neighbors(STAGED, parts))
    advise(prices, STAGED, check, seconds=prices.even_bound(slower), parts=parts, memory_bytes=0)
    traced = {traced for traced, _ in prices.workload.runs.results()}
    assert prices.workload.traced(without) in traced
    assert prices.workload.traced(slower) not in traced


def test_blocks_are_copied_without_the_rest() -> None:
    config = replace(CONFIG, tie_embeddings=True)
    with torch.device("meta"):
        model = Llama(config)
    names = block_names(model, Workload(model=model, rows=1, tokens=8).plan_of(Candidate()))
    assert names == [f"layers.{number}" for number in range(8)]
    model.get_submodule("layers.3").eps = 3.0  # type: ignore[assignment]
    copied = copy_blocks(model, names, (0, 3))
    layers = copied.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList) and len(layers) == 2 and layers[1].eps == 3.0
    assert len(model.get_submodule("layers")) == 8  # type: ignore[arg-type]
    assert copied.get_parameter("embed_tokens.weight") is copied.get_parameter("lm_head.weight")
    own, others = ({id(each) for each in some.parameters()} for some in (model, copied))
    assert not own & others


def test_the_step_with_compiled_blocks_is_priced_from_the_trace_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(candidate: Candidate) -> None:
        raise ValueError("a change is not priced")

    prices, candidate = prices_of(processes=8), Candidate(dp=8)
    prices = replace(prices, workload=replace(prices.workload, is_compiled=False))
    estimate = prices.estimate(candidate)
    parts = {str(part): seconds for part, seconds in estimate.parts.items()}
    traced: list[bool] = []

    def counted(*args: Any, **kwargs: Any) -> Trace:
        traced.append(True)
        return trace_step(*args, **kwargs)

    monkeypatch.setattr("weft.models.predict.workload.trace_step", counted)
    (found,) = advise(prices, candidate, refuse, seconds=estimate.seconds, parts=parts, memory_bytes=0)
    assert not traced
    compiled = prices_of(processes=8).estimate(candidate)
    assert found.candidate == candidate and found.is_compiled and found.seconds == compiled.seconds < estimate.seconds
