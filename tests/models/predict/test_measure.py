"""What `weft measure` measures: rates from measured calls, and the host's share of steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from weft.mesh import ProcessMesh
from weft.models.families import make_model
from weft.models.predict import measure_machine, rounds
from weft.models.predict.chip import Rate, load_chip
from weft.models.predict.events import Compute, Start
from weft.models.predict.fitting import Sample, fit_line, fit_rates, least_squares, relative_errors
from weft.models.predict.measure_step import (
    DIVIDED,
    LARGE,
    SMALL,
    StandardStep,
    collective_host_seconds_of,
    drift_of,
    host_seconds_of,
    trace_of,
)
from weft.models.predict.op_cases import Case, make_gradients, op_cases, product_shapes
from weft.models.predict.price import seconds_of
from weft.models.predict.rounds import FEWEST, Clock, interleaved
from weft.models.predict.trace import trace_step
from weft.models.step.record import StepShape
from weft.models.train.recipes import recipe

# Rates


def work(nbytes: int, flops: int = 0, *sizes: tuple[int, ...], kind: str = "memory", part: str = "forward") -> Compute:
    return Compute(name="op", part=part, kind=kind, dtype="float32", nbytes=nbytes, flops=flops, sizes=sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "true",
    [
        pytest.param((1e-5, 2e-10), id="both"),
        pytest.param((0.0, 2e-10), id="no-constant"),
        pytest.param((1e-5, 0.0), id="any-size"),
    ],
)
def test_a_line_is_found_again(true: tuple[float, float]) -> None:
    sizes = [1e3, 3e4, 5e6, 8e7]
    rate = fit_line(sizes, [true[0] + true[1] * size for size in sizes])
    assert (rate.seconds, rate.seconds_per_byte) == pytest.approx(true, abs=1e-18)


@pytest.mark.exhaustive
def test_no_rate_is_negative_and_none_fits_better() -> None:
    """Beside every point of a grid, as an oracle: times that fall with the size, and others at random."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        rows, seconds = generator.uniform(0.1, 1, (5, 2)), generator.uniform(0.5, 2, 5)
        given = generator.uniform(0, 0.5, 5)
        found = np.array(least_squares(rows, given, seconds))
        assert (found >= 0).all()

        def error(x: np.ndarray, rows: np.ndarray = rows, given: np.ndarray = given, t: np.ndarray = seconds) -> float:
            return float(np.square((given + rows @ x - t) / t).sum())

        grid = np.stack(np.meshgrid(np.linspace(0, 4, 81), np.linspace(0, 4, 81)), -1).reshape(-1, 2)
        assert error(found) <= min(map(error, grid)) + 1e-12
    assert least_squares(np.zeros((3, 1)), np.zeros(3), np.ones(3)) == [0.0]


def test_short_times_count_as_much_as_long_ones() -> None:
    """By absolute errors the longest time would hide that a short call takes 100 us."""
    rate = fit_line([1e3, 2e3, 4e3, 1e9], [1e-4, 1e-4, 1e-4, 1.1])
    assert rate.time(1e3) == pytest.approx(1e-4, rel=0.05)


def test_an_op_with_products_has_the_rate_of_the_rest() -> None:
    def product_seconds(dtype: str, M: int, N: int, K: int) -> float:
        return 1e-9 * M * N * K

    sizes = [(1, 8, 16, 32), (1, 64, 64, 64), (2, 100, 30, 7)]
    events = [work(10 * N, 2 * b * M * N * K, (b, M, N, K), kind="product") for b, M, N, K in sizes]
    samples = [
        Sample(events=(each,), seconds=3e-6 + 5e-9 * each.nbytes + size[0] * product_seconds("", *size[1:]))
        for each, size in zip(events, sizes, strict=True)
    ]
    [(key, rate)] = fit_rates(samples, product_seconds).items()
    assert key == "op.forward.float32" and rate.adds_products and rate.seconds_per_flop == 0
    assert (rate.seconds, rate.seconds_per_byte) == pytest.approx((3e-6, 5e-9), rel=1e-6)


def test_attention_has_a_rate_by_operations() -> None:
    events = [work(8 * T, 4 * T * T, (1, 1, 1, T, T, 1), kind="attention") for T in (16, 64, 300)]
    samples = [Sample(events=(each,), seconds=1e-5 + 1e-9 * each.flops) for each in events]
    [rate] = fit_rates(samples, lambda *size: None).values()
    assert not rate.adds_products
    chip = replace(load_chip("h100"), ops={"op.forward": rate})
    for each, sample in zip(events, samples, strict=True):
        found = chip.measured_seconds("op", "forward", "float32", each.nbytes, each.flops, each.sizes)
        assert found == pytest.approx(sample.seconds, rel=1e-4)


def test_a_softmax_takes_as_long_for_narrow_heads() -> None:
    """Scores are as many for each head_dim; operations are in proportion to it."""
    events = [
        work(8 * T * D, 4 * T * T * D, (1, 1, 1, T, T, D), kind="attention") for T in (16, 64, 300) for D in (16, 64)
    ]
    samples = [Sample(events=(each,), seconds=1e-10 * each.flops + 2e-9 * each.sizes[0][3] ** 2) for each in events]
    [rate] = fit_rates(samples, lambda *size: None).values()
    assert rate.seconds_per_flop == pytest.approx(1e-10, rel=1e-4)
    assert rate.seconds_per_score == pytest.approx(0.5e-9, rel=1e-4)
    chip = replace(load_chip("h100"), ops={"op.forward": rate})
    assert chip.measured_seconds("op", "forward", "float32", 1, 4 * 64, [(1, 1, 1, 8, 8, 1)]) == pytest.approx(
        4 * 64 * (1e-10 + 0.5e-9) + rate.seconds_per_byte + rate.seconds, rel=1e-4
    )


def test_several_events_of_a_call_share_its_time() -> None:
    """The backward of a gate and its product: two events of one op's part, each priced by the same rate."""
    samples = [Sample(events=(work(n), work(3 * n)), seconds=2 * 1e-6 + 4 * n * 1e-9) for n in (10, 1000, 5000)]
    [rate] = fit_rates(samples, lambda *size: None).values()
    assert (rate.seconds, rate.seconds_per_byte) == pytest.approx((1e-6, 1e-9), rel=1e-6)
    errors = relative_errors(samples, lambda event: rate.time(event.nbytes))
    assert errors["op.forward.float32"] == pytest.approx([0, 0, 0], abs=1e-6)


# What is measured

MEASURED = {case.name for case in op_cases(torch.float32)}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny", "gpt-tiny"])
def test_each_op_of_a_step_is_measured(name: str) -> None:
    with torch.device("meta"):
        model: Any = make_model(recipe(name).model)
    trace = trace_step(model, ProcessMesh.grid(dp=1), model.parallel_plan(), StepShape(batch=(2, 32)), clip_norm=1.0)
    ops = {
        event.name
        for segment in trace.segments
        for event in segment.events
        if isinstance(event, Compute) and not event.name.startswith("aten.")
    }
    assert "linear" in ops and ops - {"optimizer", "rope_tables", "rope_table"} <= MEASURED


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
def test_a_cpu_takes_as_long_for_a_recomputed_block_as_for_its_forward(name: str) -> None:
    """In float32 a CPU recomputes no single norm or gate, so the rates of these are 0. A whole block is recomputed."""
    with torch.device("meta"):
        model: Any = make_model(recipe(name).model)
    plan = replace(model.parallel_plan(), recompute="full")
    trace = trace_step(model, ProcessMesh.grid(dp=1), plan, StepShape(batch=(2, 32)), clip_norm=None)
    of_machine = {f"{op}.recompute.float32": Rate() for op in measure_machine.RECOMPUTED}
    chip = replace(load_chip("h100"), ops=of_machine | {f"{op}.forward.float32": Rate(seconds=1.0) for op in MEASURED})

    def seconds(phase: Any, *parts: str) -> dict[str, float]:
        """By op of RECOMPUTED."""
        found: dict[str, float] = {}
        for segment in trace.select(phase=phase):
            for event in segment.events if segment.place == "block" else ():
                if isinstance(event, Compute) and event.name in measure_machine.RECOMPUTED and event.part in parts:
                    found[event.name] = found.get(event.name, 0.0) + seconds_of(event, chip) * trace.count(segment)
        return found

    of_forward = seconds("forward", "forward")
    assert of_forward and seconds("backward", "repeat", "recompute") == of_forward
    assert set(seconds("backward", "recompute").values()) == {0.0}


def smallest() -> Iterator[Case]:
    """The first case of each op."""
    seen = set[str]()
    for case in op_cases(torch.float32):
        if case.name not in seen:
            seen.add(case.name)
            yield case


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in smallest()])
def test_a_case_runs_on_tensors_as_its_events_say(case: Case) -> None:
    forward, backward = case.events()
    ready = case.on("cpu")
    outputs = ready.forward()
    ready.backward(outputs, make_gradients(outputs))
    assert [each.name for each in forward] == [case.name]
    assert {(each.name, each.part) for each in backward} <= {(case.name, "backward")}
    assert all(each.dtype == case.dtype == "float32" for each in (*forward, *backward))
    written = sum(each.nbytes for each in outputs)
    assert forward[0].nbytes >= written


def test_products_are_those_of_layers_and_their_gradients() -> None:
    shapes = product_shapes()
    assert len(shapes) == len(set(shapes)) > 100
    assert all((N, M, K) in shapes or (M, K, N) in shapes for M, N, K in shapes)
    assert all(2 * M * N * K <= 2**25 for M, N, K in product_shapes(2**25))


# Timing


@pytest.mark.exhaustive
def test_the_measurements_take_the_given_seconds_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the smallest cases, each op is called once, and no copy, product or step."""
    asked = []

    def ask(calls: Any, seconds: float, clock: Clock | None, **options: Any) -> list[list[float]]:
        asked.append(seconds)
        return [[1e-3 if clock is not None else call()] for call in calls]

    monkeypatch.setattr(measure_machine, "interleaved", ask)
    monkeypatch.setattr(measure_machine, "WHOLE", 1e9)
    machine = measure_machine._Machine(torch.device("cpu"), 2, 100.0)
    machine.measure_alone()
    together = 100.0 * (measure_machine.OF_STEPS / 3 + measure_machine.OF_LINKS)
    assert sum(asked) + together == pytest.approx(100.0)


def test_rounds_take_turns_and_the_first_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    calls = [lambda name=name: order.append(name) for name in "ab"]
    times = interleaved(calls, 0.0, Clock(torch.device("cpu")))
    assert [len(each) for each in times] == [FEWEST, FEWEST]
    assert "".join(order) == "ab" * (FEWEST + 1)
    now = itertools.count(step=0.01)  # seconds: every look at the clock takes 0.01, and a round two looks
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert FEWEST + 2 <= len(interleaved([lambda: 7.0], 0.2, None)[0]) <= 10
    assert interleaved([lambda: 7.0], 0.0, None) == [[7.0] * FEWEST]


def test_a_short_call_is_timed_with_its_operands_in_the_caches() -> None:
    """By an untimed call before; a long call is timed at once."""
    order = []

    def call(name: str, seconds: list[float]) -> float:
        order.append(name)
        return seconds.pop(0)

    short, long = [9e-3, 9e-4, 1e-4, 9e-4, 2e-4, 9e-4, 3e-4], [1.0, 0.2, 0.3, 0.4]
    times = interleaved([lambda: call("short", short), lambda: call("long", long)], 0.0, None, warm=True)
    assert times == [[1e-4, 2e-4, 3e-4], [0.2, 0.3, 0.4]]
    assert order == ["short", "long", *["short", "short", "long"] * FEWEST]


def test_a_single_thread_counts_its_own_time_on_a_core() -> None:
    def wait_and_work() -> None:
        time.sleep(0.2)
        sum(range(10_000))

    threads = torch.get_num_threads()
    for count, least, most in ((1, 1e-6, 0.1), (2, 0.2, 60.0)):
        torch.set_num_threads(count)
        try:
            assert least < Clock(torch.device("cpu")).time(wait_and_work) < most
        finally:
            torch.set_num_threads(threads)


def test_the_host_takes_what_the_ops_do_not() -> None:
    trace = StandardStep(SMALL, torch.device("cpu"), 0).trace()
    chip = replace(load_chip("h100"), ops={}, memory_bandwidth=1e30)
    assert chip.measured_seconds("rms_norm", "forward", "float32", 1, 0) is None
    host = host_seconds_of(trace, 1e-3, chip)
    assert 1e-6 < host < 1e-4  # of some hundred ops
    slow = replace(chip, memory_bandwidth=1.0)
    assert host_seconds_of(trace, 1e-3, slow) == 0.0
    step = StandardStep(LARGE, torch.device("cpu"), 0)
    step.run()
    assert step.predicted_seconds(replace(chip, host_seconds=host)) > 0


def test_a_collective_takes_the_thread_what_ops_do_not() -> None:
    trace = trace_of(DIVIDED, tp=2)
    collectives = [event for segment in trace.segments for event in segment.events if isinstance(event, Start)]
    assert {event.size for event in collectives} == {2}
    chip = replace(load_chip("h100"), ops={}, memory_bandwidth=1e30, host_seconds=0.0)
    found = collective_host_seconds_of(trace, 1e-2, chip)
    assert 1e-2 / 60 < found < 1e-2 / 15  # two or more a block and phase, in 4 blocks
    launched = replace(chip, host_seconds=1e-6)
    assert 0 < collective_host_seconds_of(trace, 1e-2, launched) < found
    assert collective_host_seconds_of(trace, 1e-2, replace(launched, crowding=1e3)) == 0.0


def test_ranks_drift_apart_where_they_wait_longer_than_collectives_take() -> None:
    trace = trace_of(DIVIDED, tp=2)
    kinds = {event.kind for segment in trace.segments for event in segment.events if isinstance(event, Start)}
    instant = replace(load_chip("h100"), collectives=dict.fromkeys(kinds, Rate()))
    drift = drift_of(trace, 1e-1, 1e-2, instant)
    assert drift_of(trace, 4e-1, 1e-2, instant) == pytest.approx(drift / 2)
    count = (1e-2 / drift) ** 2 / 1e-1  # waiting = drift * sqrt(busy * count)
    assert 15 < count < 60
    slow = replace(instant, collectives=dict.fromkeys(kinds, Rate(seconds=1e-2 / count / 4)))
    assert drift_of(trace, 1e-1, 1e-2, slow) == pytest.approx(0.75 * drift)
    assert drift_of(trace, 1e-1, 1e-2, replace(slow, collectives=dict.fromkeys(kinds, Rate(seconds=1.0)))) == 0.0
