"""Plans with experts over ranks of "ep": bounds are near the price and not above, and tokens move in every pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

import pytest
import torch
from weft.models import ExpertPlan, Mixtral, MixtralConfig
from weft.models.plan_options import TokenTransport
from weft.models.predict.bounds import work_of
from weft.models.predict.chip import load_chip
from weft.models.predict.events import Compute, Start
from weft.models.predict.find_plans import parameters_of
from weft.models.predict.plan_memory import PlanMemory
from weft.models.predict.plan_prices import PlanPrices
from weft.models.predict.plans import Candidate, Space
from weft.models.predict.price import collective_seconds, seconds_of
from weft.models.predict.stage_traces import StageTraces, folded
from weft.models.predict.workload import Workload
from weft.models.train.candidates import workload_of
from weft.models.train.recipes import recipe

EXPERTS = MixtralConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=8, num_kv_heads=4, max_seq_len=512,
    num_experts=8, experts_per_token=2,
)  # fmt: skip


def by_way(workload: Workload, way: TokenTransport) -> Workload:
    """The workload with this way of tokens to experts, without the traces."""
    plan = replace(workload.plan_of(Candidate()), experts=ExpertPlan(tokens=way))
    return replace(workload, plan=plan, _plan=[])


@cache
def prices_of_experts() -> PlanPrices:
    with torch.device("meta"):
        model = Mixtral(EXPERTS)
    workload = Workload(model=model, rows=8, tokens=512, dtype=torch.bfloat16, clip_norm=1.0, is_compiled=True)
    return PlanPrices(
        workload=workload, chip=load_chip("h100"), processes=8, limit=2**40, flops=1.0,
        memory=PlanMemory(workload=workload, parameters=parameters_of(workload)),
        stages=StageTraces(workload=workload, num_experts=8),
    )  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("plan", "share"),
    [
        pytest.param({"dp": 8, "ep": 4}, 0.4, id="dp"),
        pytest.param(
            {"dp": 2, "cp": 2, "tp": 2, "ep": 4, "context": "ulysses", "zero": 3, "microbatches": 2}, 0.5, id="dp-cp-tp"
        ),
        pytest.param(
            {"dp": 2, "tp": 4, "ep": 8, "over_tp": True, "sequence": True, "microbatches": 2}, 0.5, id="over-tp"
        ),
        pytest.param(
            {
                "pp": 2,
                "cp": 2,
                "tp": 2,
                "ep": 2,
                "schedule": "gpipe",
                "context": "all_gather",
                "zero": 1,
                "microbatches": 4,
            },
            0.8,
            id="pp",
        ),
        pytest.param(
            {"pp": 2, "dp": 2, "tp": 2, "ep": 2, "schedule": "1f1b", "recompute": "full", "microbatches": 2},
            0.8,
            id="pp-dp",
        ),
        pytest.param({"dp": 8, "ep": 2, "microbatches": 4}, 0.0, id="ranks-without-rows"),
    ],
)
def test_the_bound_of_experts_over_ranks_is_a_good_part_of_the_price_and_not_above(
    plan: dict[str, Any], share: float
) -> None:
    """share: the least share of the price; 0 where ranks along "ep" have different numbers of tokens."""
    candidate = Candidate(**plan)
    prices = prices_of_experts()
    seconds, _ = prices.price(candidate)
    for bound in prices.bounds():
        assert bound.seconds(candidate) <= seconds * (1 + 1e-9), bound.name
    if share:
        assert prices.even_bound(candidate) < prices.experts_bound(candidate) < prices.stage_bound(candidate)
        assert prices.stage_bound(candidate) > share * seconds


def test_sums_of_experts_gradients_in_each_backward_pass_are_in_the_bound() -> None:
    """Under zero=2 the gradients of each of eight microbatches are summed, under zero=1 those of the step."""
    prices = prices_of_experts()
    once, often = (prices.data.of_experts(Candidate(dp=8, ep=4, zero=zero, microbatches=8)) for zero in (1, 2))
    assert once.of_backward == 0 < often.of_backward
    assert often.busy - once.busy == pytest.approx(7 * once.at_last)
    assert once.at_last == often.at_last > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("way", "forward"), [("exchange", 4), ("gather", 3)])
def test_tokens_move_to_experts_and_back_in_every_pass_however_parameters_are_sharded(
    way: TokenTransport, forward: int
) -> None:
    """forward: moves in a forward pass of a block. Counts are exchanged ahead of tokens, and not ahead of a gather."""
    workload = by_way(prices_of_experts().workload, way)

    def moves(zero: Literal[0, 1, 2, 3]) -> list[tuple[str, int, str, int]]:
        trace = workload.trace(Candidate(dp=4, ep=4, zero=zero, microbatches=2))
        return [
            (segment.phase, segment.microbatch, event.purpose, event.nbytes)
            for segment in trace.segments
            for block in segment.blocks
            for event in segment.events
            if isinstance(event, Start) and event.axes == ("ep",)
        ]

    expected = moves(0)
    assert {purpose for _, _, purpose, _ in expected} == {""}
    assert Counter(phase for phase, *_ in expected) == {"forward": 2 * 4 * forward, "backward": 2 * 4 * 3}
    for zero in (1, 2, 3):
        assert moves(zero) == expected


def test_the_way_of_tokens_is_that_of_the_step_whatever_is_run_in_its_place() -> None:
    """A step of many microbatches is run with three, and tokens come to experts as in a microbatch of the step."""
    with torch.device("meta"):
        model = Mixtral(EXPERTS)
    workload = Workload(model=model, rows=4096, tokens=512, dtype=torch.bfloat16)
    for microbatches, way in ((1, "exchange"), (1024, "gather")):
        candidate = Candidate(dp=4, ep=2, microbatches=microbatches)
        plans = workload.plan_of(candidate), workload.plan_of(*workload.run_for(candidate))
        assert [each.experts and each.experts.tokens for each in plans] == [way, way]
    named = by_way(workload, "gather")
    assert named.plan_of(Candidate(dp=4, ep=4)).experts == ExpertPlan(size=4, tokens="gather")
    assert named.plan_of(Candidate(dp=4)).experts is None


def test_a_way_of_tokens_named_by_the_run_is_priced() -> None:
    """Also beside plans without experts over ranks, for which `weft train` refuses to name a way."""
    config = recipe("qwen3-moe-tiny")
    workload = workload_of(replace(config, plan=replace(config.plan, experts_tokens="gather")))
    assert workload.plan_of(Candidate(dp=2, ep=2)).experts == ExpertPlan(size=2, tokens="gather")
    assert workload.plan_of(Candidate(dp=2)).experts is None


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "plan", [{"dp": 4, "ep": 4}, {"dp": 2, "tp": 2, "ep": 4, "over_tp": True}, {"dp": 2, "tp": 2, "ep": 2}], ids=str
)
def test_a_trace_of_experts_over_ranks_is_derived_from_two_with_fewer_rows(plan: dict[str, Any]) -> None:
    workload = prices_of_experts().workload
    stages = StageTraces(workload=workload, num_experts=8)
    candidate = Candidate(**plan, pp=2, schedule="1f1b", microbatches=2)
    rows = 32 * candidate.dp
    derived = stages.trace(candidate, rows)
    assert len(stages.known.results()) == 2 and workload.run_for(candidate, rows) not in stages.known.results()
    run = workload.trace(candidate, rows)
    chip = load_chip("h100")
    found, expected = (
        work_of(each, partial(seconds_of, chip=chip), partial(collective_seconds, chip=chip)) for each in (derived, run)
    )
    for below, above in zip((found.first[-1], found.later[-1]), (expected.first[-1], expected.later[-1]), strict=True):
        assert all(0.98 * y <= x <= y * (1 + 1e-9) for x, y in zip(below, above, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"tp": 8, "ep": 4}, id="tp"),
        pytest.param({"tp": 8, "ep": 8, "over_tp": True, "sequence": True, "recompute": "full"}, id="over-tp"),
        pytest.param({"cp": 16, "ep": 8, "context": "all_gather", "recompute": "selective"}, id="cp"),
        pytest.param({"cp": 8, "tp": 8, "ep": 2, "context": "all_gather", "sequence": True}, id="cp-tp"),
        pytest.param({"cp": 8, "tp": 4, "ep": 8, "over_tp": True, "context": "all_gather"}, id="cp-over-tp"),
    ],
)
def test_a_trace_of_experts_over_ranks_is_derived_from_the_least_sizes_of_tp_and_cp(plan: dict[str, Any]) -> None:
    """As many ranks exchange tokens in each, in groups with the stride of the mesh."""
    workload = by_way(replace(prices_of_experts().workload, rows=64, tokens=4096), "exchange")
    stages = StageTraces(workload=workload, num_experts=8, tp=(2, 4), cp=(2, 4))
    candidate = folded(Candidate(**plan, pp=2, schedule="1f1b", microbatches=3))
    rows = 4 * candidate.dp
    derived = stages.trace(candidate, rows)
    assert all(each.tp <= 4 and each.cp <= 4 for each, _ in stages.known.results())
    run = workload.trace(candidate, rows)
    chip = load_chip("h100")
    starts = [
        [each for segment in trace.segments for each in segment.events if isinstance(each, Start)]
        for trace in (derived, run)
    ]
    groups = [{(each.size, each.stride) for each in of_trace if each.axes == ("ep",)} for of_trace in starts]
    assert groups[0] == groups[1] != set()
    found, expected = (
        work_of(each, partial(seconds_of, chip=chip), partial(collective_seconds, chip=chip)) for each in (derived, run)
    )
    for below, above in zip((found.first[-1], found.later[-1]), (expected.first[-1], expected.later[-1]), strict=True):
        assert all(0.9 * y <= x <= y * (1 + 1e-9) for x, y in zip(below, above, strict=True))


def test_only_sizes_that_divide_the_experts_are_searched() -> None:
    space = Space(processes=16, rows=1, num_experts=12, schedules=())
    sizes = {(each.ep, each.over_tp) for each in space.families()}
    assert sizes == {(1, False), (2, False), (4, False), (2, True), (4, True)}


@pytest.mark.few(2)
@pytest.mark.parametrize("way", ["exchange", "gather"])
@pytest.mark.parametrize("axes", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}, {"tp": 2, "ep": 2, "over_tp": True}], ids=str)
def test_experts_over_ranks_compute_the_choices_of_one_process_between_them(
    axes: dict[str, Any], way: TokenTransport
) -> None:
    """Own tokens and received tokens together: rows divided evenly over all experts, of each a rank has a part."""
    workload = by_way(prices_of_experts().workload, way)

    def flops(candidate: Candidate) -> float:
        trace = workload.trace(candidate)
        return sum(
            trace.count(segment) * event.flops
            for segment in trace.segments
            for event in segment.events
            if isinstance(event, Compute) and event.name == "experts"
        )

    assert flops(Candidate()) > 0
    ranks = axes.get("dp", 1) * axes.get("tp", 1)
    assert ranks * flops(Candidate(**axes)) == flops(Candidate())
