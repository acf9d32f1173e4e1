"""The plans of the local search: in the space, with prices, the best of them near the best plan of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch
from weft.models import Llama, LlamaConfig, Mixtral, MixtralConfig
from weft.models.predict.chip import load_chip
from weft.models.predict.find_plans import check_stages, parameters_of, search_plans
from weft.models.predict.forks import Forks
from weft.models.predict.local_search import local_search
from weft.models.predict.neighbors import neighbors, single_changes
from weft.models.predict.plan_memory import PlanMemory
from weft.models.predict.plan_prices import PlanPrices
from weft.models.predict.plan_runs import PlanRuns
from weft.models.predict.plans import RECOMPUTES, Candidate, Space
from weft.models.predict.stage_traces import StageTraces
from weft.models.predict.timeline import PARTS
from weft.models.predict.work import count_experts
from weft.models.predict.workload import Workload

DENSE = LlamaConfig(
    vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_layers=8, num_heads=16, num_kv_heads=8,
    max_seq_len=4096,
)  # fmt: skip
EXPERTS = MixtralConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=8, num_kv_heads=4, max_seq_len=512,
    num_experts=8, experts_per_token=2,
)  # fmt: skip
H100 = load_chip("h100")
GIB = 2**30
NEAR = 1.1  # of the best plan's seconds


PLANS = [
    Candidate(dp=8, ep=4, zero=3),
    Candidate(dp=2, cp=2, tp=2, ep=4, context="ulysses", sequence=True, zero=1, microbatches=2),
    Candidate(pp=2, dp=2, tp=2, ep=2, over_tp=True, schedule="interleaved", chunks=2, microbatches=8),
]


def differs(candidate: Candidate, other: Candidate, name: str) -> bool:
    return bool(getattr(candidate, name) != getattr(other, name))


def workload_of(config: LlamaConfig | MixtralConfig) -> Workload:
    rows, tokens = (8, 512) if isinstance(config, MixtralConfig) else (16, 4096)
    with torch.device("meta"):
        model = Mixtral(config) if isinstance(config, MixtralConfig) else Llama(config)
    return Workload(model=model, rows=rows, tokens=tokens, dtype=torch.bfloat16, clip_norm=1.0, is_compiled=True)


def space_of(workload: Workload, processes: int, fixed: Mapping[str, object] | None = None) -> Space:
    experts = count_experts(workload.model)
    return Space(processes=processes, rows=workload.rows, num_experts=experts, fixed=fixed or {})


def found_by(
    workload: Workload, space: Space, limit: int, is_over: Callable[[], bool] = lambda: False
) -> tuple[list[Candidate], PlanPrices]:
    """The plans of the local search, and the prices that were asked."""
    prices = PlanPrices(
        workload=workload,
        chip=H100,
        processes=space.processes,
        limit=limit,
        flops=1.0,
        memory=PlanMemory(workload=workload, parameters=parameters_of(workload)),
        stages=StageTraces(workload=workload, num_experts=space.num_experts),
    )
    return local_search(space, check_of(workload), prices, PlanRuns(Forks(count=1)), is_over), prices


def check_of(workload: Workload) -> Callable[[Candidate], None]:
    assert isinstance(workload.model, Llama | Mixtral)
    return partial(check_stages, num_blocks=workload.model.config.num_layers)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("config", "processes", "limit", "fixed"),
    [
        pytest.param(DENSE, 4, GIB, {"cp": 1}, id="little-memory"),
        pytest.param(EXPERTS, 4, 80 * GIB, {"recompute": "none", "pp": 1, "microbatches": 1}, id="experts"),
    ],
)
def test_the_best_plan_found_is_near_the_best_of_all(
    config: LlamaConfig | MixtralConfig, processes: int, limit: int, fixed: dict[str, object]
) -> None:
    workload = workload_of(config)
    space = space_of(workload, processes, fixed)
    found, prices = found_by(workload, space, limit)
    assert found and all(each in space for each in found)
    fitting = [prices.price(each)[0] for each in found if prices.fits(each)]
    best = search_plans(workload, space, H100, check=check_of(workload), memory=limit, keep=1).plans[0]
    assert best.seconds * (1 - 1e-9) <= min(fitting) <= best.seconds * NEAR


def test_fixed_options_are_kept_and_nothing_is_priced_without_time() -> None:
    workload = workload_of(EXPERTS)
    fixed = {"dp": 2, "tp": 2, "zero": 2, "microbatches": 2, "recompute": "full", "ep": 1}
    space = space_of(workload, 4, fixed)
    asked = count()
    found, prices = found_by(workload, space, 80 * GIB, lambda: next(asked) > 3)
    assert found and {name: {getattr(each, name) for each in found} for name in fixed} == {
        name: {value} for name, value in fixed.items()
    }
    assert len(prices.workload.runs.results()) <= 4
    assert found_by(workload, space, 80 * GIB, lambda: True)[0] == []


@pytest.mark.exhaustive
def test_plans_that_exceed_the_memory_are_left_out() -> None:
    workload = workload_of(DENSE)
    fixed = {"dp": 2, "zero": 3, "microbatches": 1}
    space = space_of(workload, 2, fixed)
    kinds = [Candidate(dp=2, zero=3, recompute=kind) for kind in RECOMPUTES]
    _, prices = found_by(workload, space, 80 * GIB)
    peaks = [prices.memory.peak(each) for each in kinds]
    assert peaks == sorted(peaks, reverse=True)
    found, _ = found_by(workload, space, peaks[1])
    assert kinds[0] not in found and kinds[1] in found


def test_a_start_too_large_for_the_memory_takes_more_microbatches() -> None:
    """Else nothing would be found: all rows at once exceed the memory even with full recomputation."""
    workload = replace(workload_of(EXPERTS), rows=64)
    fixed = {"dp": 2, "tp": 1, "ep": 2, "zero": 3, "recompute": "full"}
    space = space_of(workload, 2, fixed)
    at_once, in_four = (Candidate(dp=2, ep=2, zero=3, recompute="full", microbatches=count) for count in (1, 4))
    _, prices = found_by(workload, space, 80 * GIB, lambda: True)
    limit = (prices.memory.peak(at_once) + prices.memory.peak(in_four)) // 2
    asked = count()
    found, prices = found_by(workload, space, limit, lambda: next(asked) > 6)
    assert any(prices.fits(each) for each in found)


@pytest.mark.parametrize("candidate", PLANS, ids=str)
def test_a_single_change_keeps_the_processes_and_can_be_taken_back(candidate: Candidate) -> None:
    space = Space(processes=candidate.processes, rows=64, num_experts=8)
    assert candidate in space
    parts = dict.fromkeys(PARTS, 1.0)
    near = {*single_changes(candidate), *neighbors(candidate, parts)}
    possible = {each for each in near if each in space} - {candidate}
    assert len(possible) > 5
    for each in possible:
        assert each.processes == candidate.processes
    axes = {name for each in possible for name in ("pp", "dp", "cp", "tp", "ep") if differs(each, candidate, name)}
    assert axes == {"pp", "dp", "cp", "tp", "ep"}
