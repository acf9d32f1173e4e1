"""The benchmark of the losses on a GPU does its work on a CPU too, on small sizes and by the host's clock."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import losses, truth
from benchmarks import test_cross_entropy_speed as speed
from benchmarks.failures import Failures
from benchmarks.found import Found, Measure, held, measured
from benchmarks.losses import Made, Ways
from benchmarks.timing import Host, Timed, Way


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)


def of_logits(V: int = 256) -> Found:
    return speed.of_logits(70, V, "cpu", Host(), rounds=3)


def of_products(V: int = 256) -> Found:
    return speed.of_products(70, V, 8, "cpu", Host(), rounds=3)


def test_the_ways_to_a_loss_of_logits_are_checked_and_timed() -> None:
    found = of_logits()
    baselines = {"eager torch", "eager torch, again", "torch.compile"}
    assert {"Weft", "Weft, one shard", "a copy of the logits", "a copy of a shard"} | baselines <= found.rows.keys()
    for name, row in found.rows.items():
        assert 0 < row["seconds_p20"] <= row["seconds_median"] <= row["seconds_p80"], name
        assert ("gradient_error" in row) == (not name.startswith("a copy")), name
    assert 0 < found.rows["Weft"]["gradient_error"] < truth.ROUNDED
    assert {"lse_error", "target_logit_error"} <= found.rows["Weft, one shard"].keys()


def test_the_ways_to_a_linear_loss_are_checked_and_timed() -> None:
    found = of_products()
    weft = {"Weft", "Weft, float32 gradient"}
    baselines = {"eager torch", "eager torch, again", "torch.compile", "three GEMMs", "three GEMMs, again"}
    assert weft | baselines <= found.rows.keys()
    known = {"torch, chunked", "Liger", "CCE", "CCE, unfiltered"}
    assert known == {*found.absent, *found.failed, *(name for name in found.rows if name not in weft | baselines)}
    for name in weft:
        assert {"loss_error", "weight_gradient_error", "free_classes_error"} <= found.rows[name].keys()
        assert found.rows[name]["flop"] == 6 * 70 * 8 * 256


@pytest.mark.parametrize(
    ("way", "call", "passes", "nbytes", "cached"),
    [
        pytest.param("Weft", "a copy of the logits", 2, 2 * 70 * 256, 0, id="whole-logits"),
        pytest.param("eager torch", "a copy of the logits", 2, 2 * 70 * 256, 0, id="a-baseline"),
        pytest.param("Weft, one shard", "a copy of a shard", 3, 2 * 70 * 32, 2 * 70 * 32, id="a-shard-is-read-twice"),
        pytest.param("Weft, one shard", "a copy of a shard", 2, 2 * 70 * 32, 2 * 70 * 32 + 1, id="but-not-from-the-L2"),
    ],
)
def test_the_roofline_is_what_no_way_does_without(
    monkeypatch: pytest.MonkeyPatch, way: str, call: str, passes: int, nbytes: int, cached: int
) -> None:
    monkeypatch.setattr(speed, "L2_BYTES", cached)
    found = of_logits()
    copy, row = found.rows[call]["seconds_median"], found.rows[way]
    assert row["bytes"] == passes * nbytes
    assert found.roofline(way) == pytest.approx(passes * nbytes / (2 * nbytes / copy) / row["seconds_median"])


def test_a_weights_gradient_is_float32_in_the_way_that_promises_it_alone() -> None:
    x, weight, target = speed._factors(70, 256, 8, "cpu")
    ways = losses.of_products([(x, weight, target)]).made
    dtypes = {name: ways[name]().gradients[1].dtype for name in ways if name.startswith("Weft")}
    assert dtypes.pop(losses.FLOAT32) == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    assert weight.grad_dtype == torch.bfloat16


COPY = Measure(told="read once, written once", call="a copy", unit="bytes", done=8, needed=12)


def row(timer: str = "graph", median: float = 1e-3, **rest: Any) -> dict[str, Any]:
    return Timed((median,) * 5, timer).figures | rest


def test_the_figures_are_printed_as_a_table_and_told() -> None:
    rows = {"a copy": row(), "Weft": row(roofline=0.5, peak_bytes=2e9, bytes=12), "Liger": row("events", bytes=12)}
    found = Found(case="a loss", rows=rows, absent=["CCE"], failed={"torch": "no driver"}, measures=[COPY])
    first, head, *lines = str(found).splitlines()
    assert (first, "GB above inputs and gradients" in head) == ("a loss: forward and backward", True)
    assert [line.split() for line in lines[:5]] == [
        ["a", "copy", "1.000", "1.000", "to", "1.000", "graph"],
        ["Weft", "1.000", "1.000", "to", "1.000", "graph", "50.0%", "2.000"],
        ["Liger", "1.000", "1.000", "to", "1.000", "events", "another", "timer"],
        ["CCE", "not", "installed"],
        ["torch", "failed:", "no", "driver"],
    ]
    assert lines[5:] == [
        "times by events may include waits for the host, times by graph do not: do not compare the two",
        "100% of the roofline: read once, written once, at the rate of 'a copy'",
    ]
    told = []
    found.tell_all(lambda *case, **figures: told.append((case, figures)))
    assert told == [
        *((("a loss", name, "time"), each) for name, each in rows.items()),
        (("a loss", "CCE", "time"), {"status": "absent"}),
        (("a loss", "torch", "time"), {"status": "failed", "error": "no driver"}),
    ]


def test_ways_that_are_timed_alike_need_no_word_on_it() -> None:
    found = Found(case="a loss", rows={"a copy": row(), "Weft": row()}, absent=[], failed={}, measures=[COPY])
    assert "waits for the host" not in str(found)


@pytest.mark.parametrize(
    ("rows", "roofline"),
    [
        pytest.param({"a copy": row(median=5e-4)}, 0.75, id="alike"),
        pytest.param({"a copy": row("events", 5e-4)}, None, id="another-timer"),
        pytest.param({}, None, id="the-copy-failed"),
    ],
)
def test_a_share_is_of_what_was_timed_alike(rows: dict[str, Any], roofline: float | None) -> None:
    figures = COPY.of(row(), rows)
    assert figures == {"bytes": 12, "bytes_per_second": 12e3} | ({"roofline": roofline} if roofline else {})
    found = Found(case="", rows={"Weft": row() | figures}, absent=[], failed={}, measures=[COPY])
    if not roofline:
        with pytest.raises(AssertionError, match="Weft was timed by graph, and the call of the roofline was not"):
            found.roofline("Weft")


def fails(*tensors: Tensor) -> Tensor:
    raise RuntimeError("0 active drivers\nand more")


def wrong(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: loss(*tensors) * 1.03


@pytest.mark.parametrize(
    ("make", "told"),
    [
        pytest.param(lambda: fails, "RuntimeError: 0 active drivers", id="runs"),
        pytest.param(fails, "RuntimeError: 0 active drivers", id="is-made"),
        pytest.param(lambda: __import__("broken"), "ModuleNotFoundError: No module named 'broken'", id="is-imported"),
        pytest.param(lambda: wrong(losses._eager), "Inaccurate: eager: the loss errs by", id="is-wrong"),
        pytest.param(lambda: failing_later(5), "RuntimeError: out of memory", id="is-timed"),
    ],
)
def test_a_baseline_that_fails_is_told_and_weft_is_raised(make: Callable[[], Any], told: str) -> None:
    """Where it is imported, made, checked or timed."""
    operands = [speed._logits(70, 32, "cpu", 0)]
    found: dict[str, Any] = {}

    def timed(name: str) -> Failures:
        ways = Ways()
        ways.add("Weft, right", operands, lambda: losses._eager)
        ways.add(name, operands, make)
        found.update(measured(ways, truth.of_logits(*operands[0]), {}, COPY, Host(), rounds=3, sets=1))
        return ways.failed

    failed = timed("eager")
    assert list(failed) == ["eager"] and failed["eager"].startswith(told)
    assert list(found) == ["Weft, right"]
    with pytest.raises(Exception, match=told.split(": ")[-1]):
        timed("Weft, wrong")


def failing_later(calls: int) -> Callable[..., Tensor]:
    left = iter(range(calls))

    def loss(*tensors: Tensor) -> Tensor:
        if next(left, None) is None:
            raise RuntimeError("out of memory")
        return losses._eager(*tensors)

    return loss


def test_a_package_that_cannot_be_imported_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an installed but broken library, the ways fail; the remaining ways are timed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in ("liger_kernel", "cut_cross_entropy"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_linear_cross_entropy", None)  # the import raises
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", ModuleType("cut_cross_entropy"))
    ways = losses.of_products([speed._factors(70, 256, 8, "cpu")])
    assert ways.failed["Liger"].startswith("ModuleNotFoundError: ")
    found = of_products()
    assert found.failed["CCE"].startswith("AttributeError: module 'cut_cross_entropy' has no attribute")
    assert {"Liger", "CCE", "CCE, unfiltered"} <= found.failed.keys() and "Weft" in found.rows


def test_tensors_of_a_failed_way_are_freed_before_the_cache_is_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = Failures()
    alive: list[str] = []
    given_back: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(alive.copy()))

    class Large:
        def __del__(self) -> None:
            alive.remove(self.name)

        def __init__(self, name: str) -> None:
            self.name = name
            alive.append(name)

    def way() -> None:
        held = Large("logits")
        raise RuntimeError(f"out of memory for {held.name}")

    with failed.of("eager"):
        way()
    assert (failed, given_back) == ({"eager": "RuntimeError: out of memory for logits"}, [[]])


@pytest.mark.parametrize(
    ("name", "captured"),
    [
        pytest.param("Weft", True, id="weft"),
        pytest.param("Weft, one shard", True, id="a-form-of-weft"),
        pytest.param("eager torch, again", True, id="eager"),
        pytest.param("torch.compile", False, id="compiled"),
        pytest.param("Liger", False, id="liger-asks-the-device"),
        pytest.param("CCE", False, id="cce"),
    ],
)
def test_only_ways_that_are_known_to_wait_for_nothing_are_captured(name: str, captured: bool) -> None:
    assert losses.may_be_captured(name) == captured


class FakeMemory:
    """What of torch.cuda tells of memory; before a way there are 100 bytes, and at the most 1000."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resets = 0
        answers = {
            "is_available": True,
            "synchronize": None,
            "memory_stats": {"requested_bytes.all.current": 100, "requested_bytes.all.peak": 1000},
            "empty_cache": None,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self) -> None:
        self.resets += 1


def test_bytes_held_are_those_above_inputs_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(monkeypatch)
    made = Made(torch.ones(1), [torch.ones(2, 3), torch.ones(5, dtype=torch.bfloat16)])
    assert held(lambda: made) == {"peak_bytes": 1000 - 100 - 24 - 10, "gradient_bytes": 34}
    assert held(lambda: None) == {"peak_bytes": 900, "gradient_bytes": 0}
    assert memory.resets == 2


def test_on_a_gpu_all_is_weighed_and_wefts_kernels_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeMemory(monkeypatch)
    found = of_logits()
    for name, row in found.rows.items():
        assert "peak_bytes" in row, name
        assert ("configuration" in row) == name.startswith("Weft"), name


class Replaying(Host):
    """Notes what is replayed."""

    timers = "events", "graph"

    def __init__(self) -> None:
        self.replayed = 0

    def replay(self, way: Way, calls: int) -> Way:
        self.replayed += 1
        return super().replay(way, calls)


def test_copies_weft_and_eager_torch_are_replayed_and_the_others_marked() -> None:
    clock = Replaying()
    found = speed.of_logits(70, 64, "cpu", clock, rounds=3)
    timers = {name: each["timer"] for name, each in found.rows.items()}
    assert timers.pop("torch.compile") == "events"
    assert set(timers.values()) == {"graph"} and len(timers) == clock.replayed == 6
    assert "roofline" not in found.rows["torch.compile"]
    assert "another timer" in str(found)


def test_operands_are_taken_in_turn_by_each_way() -> None:
    operands = [speed._logits(3, 8, "cpu", seed) for seed in range(2)]
    for way in [*losses.of_logits(operands).made.values(), *losses.of_a_shard(operands).made.values()]:
        if isinstance(made := _or_none(way), Made):
            second, third = way().gradients[0], way().gradients[0]
            assert torch.equal(made.gradients[0], third) and not torch.equal(second, third)


def _or_none(way: Callable[[], Made]) -> Made | None:
    try:
        return way()
    except RuntimeError:  # Liger, without a GPU
        return None
