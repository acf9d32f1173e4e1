"""`StageTraces`: a derived trace has no price above the price of the same candidate's run, and nearly this price."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Literal

import pytest
import torch
from weft.mesh import ProcessMesh
from weft.models import Llama, LlamaConfig
from weft.models.predict.bounds import work_of
from weft.models.predict.chip import load_chip
from weft.models.predict.events import Segment, Start, Trace
from weft.models.predict.plans import Candidate
from weft.models.predict.price import seconds_of, transfer
from weft.models.predict.stage_traces import StageTraces, combined, least_two, line
from weft.models.predict.trace import Reduced, trace_step
from weft.models.predict.workload import Workload
from weft.models.schedules.pipeline_plan import PipelinePlan
from weft.models.step.alike import Representative, block_names, copy_blocks

CONFIG = LlamaConfig(
    vocab_size=4096, hidden_size=1024, intermediate_size=2048, num_layers=4, num_heads=16, num_kv_heads=8,
    max_seq_len=2048,
)  # fmt: skip
STAGE = Candidate(pp=2, schedule="1f1b", microbatches=3)


@pytest.fixture(scope="module")
def traces() -> StageTraces:
    with torch.device("meta"):
        workload = Workload(model=Llama(CONFIG), rows=64, tokens=2048, dtype=torch.bfloat16)
    return StageTraces(workload=workload, tp=(2, 4), cp=(2, 4))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("stage", "rows", "nearest"),
    [
        pytest.param(STAGE, 6, 0.98, id="rows"),
        pytest.param(replace(STAGE, tp=8, sequence=True), 1, 0.98, id="tp"),
        pytest.param(replace(STAGE, tp=2, cp=16, context="all_gather", recompute="selective"), 1, 0.98, id="cp"),
        pytest.param(replace(STAGE, tp=8, cp=8, context="all_gather", sequence=True), 5, 0.95, id="all"),
        pytest.param(replace(STAGE, tp=16, sequence=True), 1, 0.9, id="replicated-heads"),
    ],
)
def test_a_derived_trace_is_priced_as_the_one_that_is_run(
    traces: StageTraces, stage: Candidate, rows: int, nearest: float
) -> None:
    chip = load_chip("h100")

    def price(start: Start) -> float:
        return transfer(replace(start, number=0, module="", group=""), chip, world=256).seconds

    derived, run = traces.trace(stage, rows), traces.workload.trace(stage, rows)
    assert derived is not run and (stage, rows) in traces._traces
    assert derived.message_bytes == run.message_bytes
    found, expected = (work_of(each, lambda each: seconds_of(each, chip), price) for each in (derived, run))
    for of_derived, of_run in ((found.first[-1], expected.first[-1]), (found.later[-1], expected.later[-1])):
        for below, above in zip(of_derived, of_run, strict=True):
            assert nearest * above * (1 - 1e-6) <= below <= above * (1 + 1e-9)


@pytest.mark.parametrize(
    "candidate",
    [
        STAGE,
        pytest.param(replace(STAGE, tp=2, cp=2, context="all_gather"), marks=pytest.mark.exhaustive),
        replace(STAGE, tp=2, sequence=True, recompute="full"),
        pytest.param(replace(STAGE, cp=2, context="ulysses", recompute="selective"), marks=pytest.mark.exhaustive),
        pytest.param(replace(STAGE, microbatches=1), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_the_passes_of_few_blocks_and_two_microbatches_are_those_of_a_step(
    traces: StageTraces, candidate: Candidate
) -> None:
    """To the last digit, beside a step with every kind of block: a stage's last block has no work of its own."""
    chip, workload = load_chip("h100"), traces.workload
    mesh, plan = ProcessMesh.grid(**candidate.axes), workload.plan_of(candidate, 2)
    names = block_names(workload.model, plan)
    every = Reduced(copy_blocks(workload.model, names, range(4)), names, [Representative(i, (i,)) for i in range(4)])
    plan = replace(plan, pipeline=PipelinePlan(microbatches=candidate.microbatches))
    few = traces.run(candidate, 2)
    with workload.autocast():
        shape = workload.shape(2 * candidate.microbatches, candidate.microbatches)
        run = trace_step(workload.model, mesh, plan, shape, reduced=every)
    assert {each.microbatch for each in few.segments} == {*range(min(2, candidate.microbatches))}
    assert len({each.blocks for each in few.segments if each.blocks}) == 2
    assert few.message_bytes == run.message_bytes

    def seconds(trace: Trace) -> list[float]:
        work = work_of(trace, lambda each: seconds_of(each, chip), lambda start: start.nbytes * 1e-9, 1e-6)
        return [each for sums in (*work.first, *work.later) for each in sums]

    assert seconds(few) == pytest.approx(seconds(run), rel=1e-12)


@pytest.mark.exhaustive
def test_few_runs_give_many_traces(traces: StageTraces) -> None:
    before = len(traces.known.results())
    for rows in (2, 3, 4, 8, 16, 32):
        traces.trace(replace(STAGE, recompute="full"), rows)
    assert len(traces.known.results()) - before <= 2


@pytest.mark.exhaustive
def test_tokens_that_are_not_divided_evenly_are_run(traces: StageTraces) -> None:
    odd = StageTraces(workload=replace(traces.workload, tokens=100), tp=(2, 4), cp=(2, 4))
    odd.trace(replace(STAGE, tp=8), 1)
    assert [stage.tp for stage, _ in odd.known.results()] == [8]


def test_traces_that_differ_in_more_than_numbers_are_not_combined(traces: StageTraces) -> None:
    one, other = traces.trace(STAGE, 2), traces.trace(replace(STAGE, recompute="full"), 2)
    assert combined([one, other], [Fraction(1, 2)] * 2, {}) is None


def test_a_line_through_two_points() -> None:
    first, second = line((2, 3), 7)
    assert first * 21 + second * 31 == 71


def test_the_two_least_sizes_stand_for_all() -> None:
    assert least_two([1, 4, 2, 8]) == (2, 4)
    assert least_two([1, 3]) == (3,)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_sums_of_gradients_over_data_ranks_are_derived_with_as_many_buckets(
    traces: StageTraces, zero: Literal[0, 1, 2]
) -> None:
    """With more ranks of "tp", gradients are smaller and share buckets: few runs give these traces too."""
    with torch.device("meta"):  # a block's gradients fill several buckets with tp=2, and fewer with tp=8
        model = Llama(replace(CONFIG, hidden_size=4096, intermediate_size=8192))
    workload = Workload(model=model, rows=2, tokens=256, dtype=torch.bfloat16)
    stages = StageTraces(workload=workload, tp=(2, 4))
    candidates = [Candidate(pp=2, schedule="1f1b", dp=2, tp=tp, zero=zero) for tp in (2, 4, 8)]
    derived = [stages.trace(each, 2) for each in candidates]
    assert [each.tp for each, _ in stages.known.results()] == [2, 4]
    for candidate, found in zip(candidates, derived, strict=True):
        run = workload.trace(candidate, 2)
        assert [sums_of(each) for each in run.segments] == [
            pytest.approx(sums_of(each), rel=1e-4) for each in found.segments
        ]
    assert len({sum(map(len, map(sums_of, each.segments))) for each in derived}) > 1


def sums_of(segment: Segment) -> list[int]:
    """The bytes of each sum of gradients over "dp"."""
    return [e.nbytes for e in segment.events if isinstance(e, Start) and e.purpose == "gradients" and "dp" in e.axes]
