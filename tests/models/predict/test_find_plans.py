"""Bounds are never above prices, on plans drawn at random; and branch and bound finds what brute force finds."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import islice
from typing import Any, Literal

import pytest
import torch
from torch import nn
from weft.mesh import ProcessMesh
from weft.models import Llama, LlamaConfig, Mixtral, MixtralConfig
from weft.models.plan_options import Recompute
from weft.models.predict.bounds import floor_seconds
from weft.models.predict.chip import Chip, load_chip
from weft.models.predict.data_work import data_work_of
from weft.models.predict.events import Start
from weft.models.predict.find_plans import check_stages, parameters_of, search_plans
from weft.models.predict.plan_families import least_seconds, least_weights
from weft.models.predict.plan_memory import PlanMemory, least_tp
from weft.models.predict.plan_prices import PlanPrices
from weft.models.predict.plans import RECOMPUTES, Candidate, Space
from weft.models.predict.search import search
from weft.models.predict.stage_traces import StageTraces, least_two
from weft.models.predict.work import count_experts
from weft.models.predict.workload import Workload
from weft.models.rope import rotary_tables
from weft.models.step.memory import predict_memory

from .every_plan import list_every_plan

WIDE = LlamaConfig(
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_layers=6, num_heads=16, num_kv_heads=4,
    max_seq_len=4096,
)  # fmt: skip
NARROW = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=4, num_heads=8, num_kv_heads=4, max_seq_len=256
)
# Without compilation, the host takes longer than the device.
HOSTED = LlamaConfig(
    vocab_size=512,
    hidden_size=1536,
    intermediate_size=4096,
    num_layers=24,
    num_heads=16,
    num_kv_heads=4,
    max_seq_len=64,
)
EXPERTS = MixtralConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=8, num_kv_heads=4, max_seq_len=512,
    num_experts=8, experts_per_token=2,
)  # fmt: skip
GIB = 2**30
H100 = load_chip("h100")


def model_of(config: LlamaConfig | MixtralConfig) -> nn.Module:
    with torch.device("meta"):
        return Mixtral(config) if isinstance(config, MixtralConfig) else Llama(config)


@cache
def prices_of(
    config: LlamaConfig | MixtralConfig,
    processes: int,
    rows: int,
    tokens: int,
    compiled: bool,
    chip: Chip = H100,
) -> tuple[PlanPrices, tuple[Candidate, ...]]:
    """The prices of a workload, and all its candidates."""
    model = model_of(config)
    workload = Workload(
        model=model, rows=rows, tokens=tokens, dtype=torch.bfloat16, clip_norm=1.0, is_compiled=compiled
    )
    space = Space(processes=processes, rows=rows, num_experts=count_experts(model))
    check = partial(check_stages, num_blocks=config.num_layers)
    candidates = tuple(list_every_plan(space, check).accepted)
    memory = PlanMemory(
        workload=workload, parameters=parameters_of(workload), run_tps=least_tp(each.tp for each in candidates)
    )
    tp, cp = (least_two(getattr(each, axis) for each in candidates) for axis in ("tp", "cp"))
    prices = PlanPrices(
        workload=workload, chip=chip, processes=processes, limit=80 * GIB, flops=1.0, memory=memory,
        stages=StageTraces(workload=workload, tp=tp, cp=cp, num_experts=space.num_experts),
    )  # fmt: skip
    return prices, candidates


CASES = [
    pytest.param(WIDE, 64, 64, 4096, True, id="wide-64"),
    pytest.param(WIDE, 24, 24, 1000, False, id="uneven-24"),
    pytest.param(NARROW, 8, 6, 100, False, id="narrow-8"),
    pytest.param(EXPERTS, 8, 8, 512, True, id="experts-8"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("config", "processes", "rows", "tokens", "compiled"), CASES)
def test_no_bound_is_above_the_price(
    config: LlamaConfig, processes: int, rows: int, tokens: int, compiled: bool
) -> None:
    prices, candidates = prices_of(config, processes, rows, tokens, compiled)
    priced = 0
    for candidate in random.Random(0).sample(candidates, 10):
        seconds, _ = prices.price(candidate)
        if seconds == math.inf:
            continue  # refused by the model
        priced += 1
        family = replace(candidate, sequence=False, zero=0, recompute="none")
        assert least_seconds(prices, family)[0] <= seconds * (1 + 1e-9) or prices.weights_bound(candidate) == math.inf
        assert prices.experts_bound(family) <= seconds * (1 + 1e-9), str(candidate)
        for bound in prices.bounds():
            found = bound.seconds(candidate)
            if found < math.inf:
                assert found <= seconds * (1 + 1e-9), f"{bound.name} of {candidate}"
    assert priced >= 3


@pytest.mark.exhaustive
@pytest.mark.parametrize(("config", "processes", "rows", "tokens", "compiled"), CASES)
def test_no_bound_of_a_family_is_above_a_members(
    config: LlamaConfig, processes: int, rows: int, tokens: int, compiled: bool
) -> None:
    prices, candidates = prices_of(config, processes, rows, tokens, compiled)
    for each in random.Random(2).sample(candidates, 200):
        family = replace(each, sequence=False, zero=0, recompute="none")
        assert least_seconds(prices, family)[0] <= max(prices.even_bound(each), prices.weights_bound(each))
        assert least_weights(prices, family) <= prices.memory.weights_floor(each)
        assert prices.experts_bound(family) <= prices.experts_bound(each), str(each)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_no_bound_is_above_the_price_of_a_step_that_waits_for_the_host(zero: Literal[0, 1, 2, 3]) -> None:
    prices, candidates = prices_of(HOSTED, 16, 16, 64, False)
    alike = [each for each in candidates if (each.dp, each.zero, each.microbatches) == (16, zero, 1)]
    (candidate,) = [each for each in alike if each.recompute == "none"]
    seconds, _ = prices.price(candidate)
    for bound in prices.bounds():
        assert bound.seconds(candidate) <= seconds * (1 + 1e-9), bound.name


SLOW_LINKS = replace(H100, levels=tuple(replace(each, bandwidth=each.bandwidth / 50) for each in H100.levels))


@pytest.mark.exhaustive
@pytest.mark.parametrize("microbatches", [1, 2, 8])
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"dp": 8, "zero": 3}, id="gathers"),
        pytest.param({"dp": 4, "tp": 2, "zero": 3, "recompute": "full", "sequence": True}, id="gathers-tp"),
        pytest.param({"dp": 2, "cp": 4, "context": "ulysses", "zero": 3}, id="gathers-cp"),
        pytest.param({"pp": 4, "dp": 2, "schedule": "1f1b", "zero": 2}, id="sums-1f1b"),
        pytest.param({"pp": 2, "dp": 4, "schedule": "interleaved", "chunks": 2, "zero": 3}, id="sums-interleaved"),
        pytest.param({"pp": 3, "dp": 2, "schedule": "zero_bubble", "zero": 2}, id="sums-zero-bubble"),
    ],
)
def test_a_bound_by_slow_links_is_a_good_part_of_the_price_and_not_above(
    plan: dict[str, Any], microbatches: int
) -> None:
    """Gathers under zero=3 and sums in each backward pass take longer than the work."""
    candidate = Candidate(**plan, microbatches=microbatches)
    prices, _ = prices_of(WIDE, candidate.processes, 64, 512, True, SLOW_LINKS)
    seconds, _ = prices.price(candidate)
    for bound in prices.bounds():
        assert bound.seconds(candidate) <= seconds * (1 + 1e-9), bound.name
    assert prices.stage_bound(candidate) > 0.3 * seconds


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [2, 3])
def test_a_trace_of_data_ranks_serves_each_context_and_number_of_microbatches(zero: Literal[2, 3]) -> None:
    prices, _ = prices_of(NARROW, 8, 16, 64, True)
    candidate = Candidate(dp=2, cp=2, tp=2, context="ulysses", zero=zero, microbatches=2)
    trace = prices.stages.fused(candidate, 2)

    def seconds(start: Start) -> float:
        return prices._transfer(start) if {"dp", "cp"} & {*start.axes} else 0.0

    assert trace is not None
    of_candidate = data_work_of(trace, lambda compute: floor_seconds(compute, H100), seconds, gathers_always=zero == 3)
    found = prices.data.work(candidate)
    assert found is not None
    assert asdict(found) == pytest.approx(asdict(of_candidate), rel=1e-12)
    assert found.busy > found.at_last > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_floor_with_gathered_parameters_is_below_the_memory(recompute: Recompute, microbatches: int) -> None:
    """One run with two data ranks gives the floors of all sizes of "dp" and "cp".

    The floor leaves out the buckets of gradients in flight, eight matrices: little beside the activations of many rows.
    """
    prices, _ = prices_of(replace(WIDE, num_layers=8), 16, 512, 512, True)
    plan: dict[str, Any] = {"zero": 3, "recompute": recompute, "microbatches": microbatches, "tp": 2, "sequence": True}
    candidates = [
        Candidate(dp=8, **plan), Candidate(dp=4, cp=2, context="all_gather", **plan),
        Candidate(dp=4, cp=2, context="ulysses", **plan), Candidate(dp=1, cp=8, context="all_gather", **plan),
    ]  # fmt: skip
    runs = {run for each in candidates for run in prices.memory.gathered_runs(each)}
    assert len(runs) == 1
    for each in candidates:
        floor, peak = prices.memory.gathered_floor(each), prices.memory.peak(each)
        assert prices.memory.weights_floor(each) < floor <= peak
        assert floor > 0.6 * peak
    assert prices.memory.gathered_runs(Candidate(dp=8, cp=2, context="all_gather", **plan | {"microbatches": 64})) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("config", "processes", "rows", "tokens", "compiled"), CASES)
def test_no_floor_is_above_the_memory(
    config: LlamaConfig, processes: int, rows: int, tokens: int, compiled: bool
) -> None:
    prices, candidates = prices_of(config, processes, rows, tokens, compiled)
    measured = 0
    for candidate in random.Random(1).sample(candidates, 5):
        try:
            memory = prices.memory
            peak, floor, gathered = memory.peak(candidate), memory.floor(candidate), memory.gathered_floor(candidate)
        except ValueError:
            continue  # refused by the model
        measured += 1
        assert prices.memory.weights_floor(candidate) <= peak, str(candidate)
        assert max(floor, gathered) <= peak, str(candidate)
    assert measured >= 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", [{}, {"pp": 2, "schedule": "1f1b"}], ids=["whole", "stages"])
def test_no_floor_by_runs_of_other_candidates_is_above_the_memory(axes: dict[str, Any]) -> None:
    """Each candidate's floor, after a run of each other candidate, which differs in zero, dp and microbatches."""
    prices, _ = prices_of(replace(NARROW, num_layers=8), 8, 16, 64, True)
    same = {"recompute": "selective", "tp": 2, "sequence": True, **axes}
    changes: list[dict[str, Any]] = [
        {"dp": 2, "microbatches": 2}, {"dp": 2, "microbatches": 4, "zero": 1}, {"dp": 4, "microbatches": 2, "zero": 2},
        {"dp": 4, "microbatches": 4, "zero": 3}, {"dp": 1, "microbatches": 8},
    ]  # fmt: skip
    candidates = [Candidate(**same, **each) for each in changes]
    peaks = [prices.memory.peak(each) for each in candidates]
    for known in candidates:
        memory = PlanMemory(workload=prices.workload, parameters=prices.memory.parameters)
        without = [memory.known_floor(each) for each in candidates]
        assert not memory.parts.results() and not memory.saved.results(), "a floor runs nothing"
        memory.peak(known)
        floors = [memory.known_floor(each) for each in candidates]
        assert all(map(float.__le__, floors, map(float, peaks)))
        assert all(map(float.__gt__, floors, without)), "the run of one candidate tells of the others"
        assert len(memory.parts.results()) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("axes", [{}, {"pp": 2, "schedule": "1f1b"}], ids=["whole", "stages"])
def test_no_floor_by_a_run_with_other_sizes_of_tp_and_cp_is_above_the_memory(
    axes: dict[str, Any], recompute: Recompute
) -> None:
    prices, _ = prices_of(replace(NARROW, num_layers=8), 8, 16, 64, True)
    changes: list[dict[str, Any]] = [
        {"dp": 8}, {"dp": 4, "tp": 2}, {"dp": 2, "tp": 4}, {"dp": 4, "tp": 2, "sequence": True},
        {"dp": 2, "tp": 4, "sequence": True}, {"dp": 4, "cp": 2, "context": "all_gather"},
        {"dp": 4, "cp": 2, "context": "ulysses"}, {"dp": 2, "cp": 4, "context": "all_gather"},
        {"dp": 2, "cp": 4, "context": "ulysses"}, {"dp": 2, "tp": 2, "cp": 2, "context": "all_gather"},
    ]  # fmt: skip
    candidates = [Candidate(**axes, **each, microbatches=4, recompute=recompute) for each in changes]
    peaks = [prices.memory.peak(each) for each in candidates]
    raised = 0
    for known in candidates:
        memory = PlanMemory(workload=prices.workload, parameters=prices.memory.parameters)
        without = [memory.known_floor(each) for each in candidates]
        run = prices.memory.run_for(known)
        memory.parts.learn(*run, prices.memory.parts.of(*run))
        floors = [memory.known_floor(each) for each in candidates]
        assert all(map(float.__le__, floors, map(float, peaks))), str(known)
        raised += sum(floor > before for floor, before in zip(floors, without, strict=True))
    assert raised > 2 * len(candidates), "runs tell of candidates with other sizes"


@pytest.mark.exhaustive
def test_memory_under_zero_bubble_is_that_of_the_whole_step() -> None:
    """Memory composed from parts would be too low: operands of weights' gradients stay until these are computed."""
    prices, _ = prices_of(NARROW, 8, 16, 64, True)
    candidate = Candidate(pp=2, dp=4, schedule="zero_bubble", microbatches=4)
    plan = prices.memory.workload.plan_of(candidate)
    with prices.memory.workload.autocast():
        whole = [
            predict_memory(
                *(prices.memory.workload.model, ProcessMesh.grid(**candidate.axes), plan),
                rank=rank, batch=(16, 64), microbatches=4, clip_norm=prices.memory.workload.clip_norm,
            ).nbytes
            for rank in (0, 4)
        ]  # fmt: skip
    assert prices.memory.peak(candidate) == max(whole)


def test_a_trace_is_the_same_in_a_process_that_has_traced_before() -> None:
    """Tables of rotary angles are made once in a process, and by no later step."""
    rotary_tables.cache_clear()
    first, second = (
        Workload(model=model_of(NARROW), rows=2, tokens=96, dtype=torch.bfloat16).trace(Candidate()) for _ in range(2)
    )
    assert first.segments == second.segments


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [8])
def test_branch_and_bound_finds_what_brute_force_finds(processes: int) -> None:
    prices, candidates = prices_of(WIDE, processes, 2, 1024, True)
    some = [each for each in candidates if each.context != "all_gather" and each.recompute != "selective"]
    some = [each for each in some if each.zero in (0, 3) and each.schedule in (None, "1f1b")]
    outcome = search(some, prices.bounds(), prices.price)
    everything = sorted((prices.price(each)[0], each.complexity, each) for each in some)  # type: ignore[type-var]
    fitting = [entry for entry in everything if entry[0] < math.inf]
    assert [(each.seconds, each.candidate) for each in outcome.found] == [(s, each) for s, _, each in fitting[:10]]
    assert outcome.certificate.is_complete
    assert outcome.certificate.priced < len(fitting), "something was cut off"
    assert outcome.certificate.enumerated == len(some)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_branch_and_bound_finds_what_brute_force_finds_on_machines_and_models_drawn_at_random(seed: int) -> None:
    """Of a sample of candidates, half of which are above the memory."""
    draw = random.Random(seed)
    heads = draw.choice([4, 8])
    config = replace(NARROW, num_layers=draw.choice([4, 6, 8]), num_heads=heads, hidden_size=heads * 32)
    chip = replace(
        H100,
        memory_bandwidth=H100.memory_bandwidth * draw.uniform(0.2, 3),
        host_seconds=H100.host_seconds * draw.uniform(0, 3),
        levels=tuple(
            replace(each, bandwidth=each.bandwidth * draw.uniform(0.1, 2), latency=each.latency * draw.uniform(0, 3))
            for each in H100.levels
        ),
    )
    prices, candidates = prices_of(config, draw.choice([6, 8]), 8, draw.choice([96, 128]), seed % 2 == 0, chip)
    some = draw.sample(candidates, 40)
    able = [(prices.price(each)[0], each.complexity, each) for each in some]
    able = sorted(entry for entry in able if entry[0] < math.inf)  # type: ignore[type-var]
    limit = sorted(prices.memory.peak(each) for _, _, each in able)[len(able) // 2]
    prices = replace(prices, limit=limit)
    outcome = search(some, prices.bounds(), prices.price, fits=prices.fits, keep=3)
    fitting = [(seconds, each) for seconds, _, each in able if prices.fits(each)]
    assert 3 < len(fitting) < len(able)
    assert [(each.seconds, each.candidate) for each in outcome.found] == fitting[:3]
    proof = outcome.certificate
    assert proof.is_complete
    left_out = sum(proof.cut.values()) + sum(proof.refused.values())
    assert proof.enumerated == len(some) == left_out + proof.priced
    assert sum(proof.cut.values()) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("config", "processes", "rows", "fixed", "enumerated"),
    [
        pytest.param(NARROW, 2, 2, {"recompute": "none", "zero": 0}, 16, id="2-of-a-plan"),
        pytest.param(NARROW, 8, 2, {}, 1662, id="8"),
        pytest.param(EXPERTS, 4, 1, {}, 765, id="4-with-experts"),
    ],
)
def test_the_best_ten_are_those_of_every_plan_priced(
    config: LlamaConfig | MixtralConfig, processes: int, rows: int, fixed: dict[str, Any], enumerated: int
) -> None:
    """Of every enumerated plan, with memory for half of the ten fastest."""
    model = model_of(replace(config, num_layers=6))
    workload = Workload(model=model, rows=rows, tokens=96, dtype=torch.bfloat16, clip_norm=1.0, is_compiled=True)
    space = Space(processes=processes, rows=rows, num_experts=count_experts(model), fixed=fixed)
    check = partial(check_stages, num_blocks=6)
    memory = PlanMemory(workload=workload, parameters=parameters_of(workload))
    prices = PlanPrices(
        workload=workload, chip=H100, processes=processes, limit=0, flops=1.0, memory=memory,
        stages=StageTraces(workload=workload),
    )  # fmt: skip
    every = [(prices.price(each)[0], each) for each in list_every_plan(space, check).accepted]
    able = sorted((pair for pair in every if pair[0] < math.inf), key=lambda pair: (pair[0], pair[1].complexity))
    limit = sorted(memory.peak(each) for _, each in able[:10])[4]
    expected = list(islice((pair for pair in able if memory.peak(pair[1]) <= limit), 10))
    found = search_plans(workload, space, H100, check=check, memory=limit)
    assert [(each.seconds, each.candidate) for each in found.plans] == expected
    assert [each.memory_bytes for each in found.plans] == [memory.peak(each) for _, each in expected]
    assert found.certificate.is_complete and found.certificate.enumerated == enumerated
    assert found.certificate.priced < len(able), "something was cut off"
