"""`weft measure`: rates from measured calls, what is measured, and the file that comes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from weft.mesh import ProcessMesh
from weft.models.cli import main
from weft.models.cli import measure as measure_command
from weft.models.families import make_model
from weft.models.predict.chip import Chip, Product, Rate, load_chip
from weft.models.predict.events import Compute
from weft.models.predict.fitting import Sample, fit_line, fit_rates, least_squares, relative_errors
from weft.models.predict.measure import Measuring
from weft.models.predict.measure_step import LARGE, SMALL, StandardStep, host_seconds_of
from weft.models.predict.op_cases import Case, make_gradients, op_cases, product_shapes
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


def test_rounds_take_turns_and_the_first_is_not_counted() -> None:
    order = []
    calls = [lambda name=name: order.append(name) for name in "ab"]
    times = interleaved(calls, 0.0, Clock(torch.device("cpu")))
    assert [len(each) for each in times] == [FEWEST, FEWEST]
    assert "".join(order) == "ab" * (FEWEST + 1)
    begin = time.monotonic()
    assert len(interleaved([lambda: time.sleep(0.01)], 0.2, Clock(torch.device("cpu")))[0]) >= FEWEST + 2
    assert time.monotonic() - begin < 2
    assert interleaved([lambda: 7.0], 0.0, None) == [[7.0] * FEWEST]


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


# The command


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param(["--processes", "0"], "--processes is 0; give 1 to 256", id="no-process"),
        pytest.param(["--processes", "100000"], "--processes is 100000; give 1 to 256", id="many"),
        pytest.param(["--seconds", "nan"], "--seconds is nan; give more than 0, and at most 3600", id="nan"),
        pytest.param(["--seconds", "-1"], "--seconds is -1; give more than 0", id="negative"),
        pytest.param(["--seconds", "1e9"], "--seconds is 1e+09; give more than 0, and at most 3600", id="years"),
        pytest.param(["--output", "here"], "--output here does not end in .toml; name it here.toml", id="suffix"),
        pytest.param(["--output", "no/here.toml"], "cannot be written: no is no folder", id="no-folder"),
        pytest.param(["--output", "folder.toml"], "--output folder.toml is no plain file; give another", id="a-folder"),
    ],
)
def test_input_that_cannot_be_used_is_one_line(
    arguments: list[str],
    error: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    monkeypatch.setattr(measure_command, "measure", lambda measuring: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        main(["measure", *arguments])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("weft measure: ") and error in err


def test_a_gpu_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure_command, "gpu_count", lambda: 4)
    with pytest.raises(SystemExit):
        main(["measure", "--processes", "8"])
    assert "--processes is 8, and this machine has 4 GPUs; give 4 or less" in capsys.readouterr().err


def measured() -> Chip:
    return replace(
        load_chip("h100"),
        name="this machine",
        source="measured today",
        threads=1,
        ops={"attention.forward.float32": Rate(seconds=1e-6, seconds_per_flop=2e-12)},
        products=(Product(dtype="float32", M=8, N=8, K=8, seconds=1e-6),),
        collectives={"all-reduce": Rate(seconds=1e-5, seconds_per_byte=1e-9), "recv": Rate(seconds=1e-5)},
    )


def test_what_was_found_is_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[Measuring] = []
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(measure_command, "gpu_count", lambda: 0)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.25, 0.0, 0.0))
    monkeypatch.setattr(measure_command, "measure", lambda measuring: asked.append(measuring) or measured())
    monkeypatch.chdir(tmp_path)
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (tmp_path / "chip-here.toml").symlink_to(outside)
    with pytest.raises(SystemExit) as ended:
        main(["measure", "--seconds", "7", "--processes", "3"])
    assert ended.value.code == 0
    signal.signal(signal.SIGTERM, before)
    out = capsys.readouterr().out
    assert asked == [Measuring(processes=3, seconds=7.0, gpus=0)]
    assert load_chip(tmp_path / "chip-here.toml") == measured() and outside.read_text() == "kept"
    assert "other programs keep 3.2 cores busy; the measured times will be too long" in out
    assert "all-reduce               10 us and 1.00 GB/s" in out
    assert "attention                forward 1 us + 2.0 ps an operation" in out
    assert out.endswith("wrote chip-here.toml; weft explain --chip chip-here.toml predicts a step here\n")


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_short_measurement_writes_a_file_for_predictions(tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "weft.models.cli", "measure", "--seconds", "0.5", "--output", "here.toml"]
    result = subprocess.run(
        [*command, "--processes", "2"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280
    )
    assert (result.returncode, result.stderr) == (0, "")
    chip = load_chip(tmp_path / "here.toml")
    assert chip.threads == 1 and chip.crowding >= 1 and "measured" in chip.source
    assert 1e8 < chip.peak("float32") < 1e13 and 1e8 < chip.memory_bandwidth < 1e13
    assert {"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "recv"} == set(chip.collectives)
    assert all(rate.time(2**20) > 0 for rate in chip.collectives.values())
    for name in ("linear", "attention", "rms_norm", "swiglu_linear", "cross_entropy"):
        rate = chip.rate(name, "forward", "float32")
        assert rate is not None and (rate.adds_products or 0 < rate.time(2**20, 2**24) < 10)
        # On a CPU, the loss computes its gradient in forward.
        part = "forward" if name == "cross_entropy" else "backward"
        assert chip.rate(name, part, "bfloat16") is not None
    assert chip.link(2, 1)[1] < 1e12 and 0 <= chip.levels[0].slowdown <= 1
    assert 0 <= chip.host_seconds < 1e-2
