"""The benchmark of the losses on a GPU does its work on a CPU too, on small sizes and by the host's clock."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from benchmarks import test_cross_entropy_speed as speed
from benchmarks import timing
from benchmarks.timing import Host, Timed, Way, in_turn
from tests.kernels.test_aot import KEPT


def test_the_losses_are_compared_and_timed(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    logits = speed.of_logits(70, 256, "cpu", Host(), rounds=3)
    products = speed.of_products(70, 256, 8, "cpu", Host(), rounds=3)
    assert {"Weft", "Weft, one shard", "eager torch", "a copy of the logits"} <= logits.rows.keys()
    assert {"Weft", "Weft, inplace_backward", "three GEMMs"} <= products.rows.keys()
    for name, row in (logits.rows | products.rows).items():
        assert 0 < row["seconds_p20"] <= row["seconds_median"] <= row["seconds_p80"], name
    copied = logits.rows["a copy of a shard"]["seconds_median"] / logits.rows["Weft, one shard"]["seconds_median"]
    assert logits.roofline("Weft, one shard") == copied
    assert logits.rows["Weft"]["bytes"] == 2 * 2 * 70 * 256
    assert products.rows["Weft"]["flop"] == 6 * 70 * 8 * 256
    assert 0 < logits.rows["Weft"]["gradient_error"] < speed.TOLERANCE


def test_what_was_found_is_a_table_and_is_told():
    row = Timed((1e-3,) * 5, "events").figures | {"roofline": 0.5, "peak_bytes": 2e9}
    found = speed.Found(case="a loss", rows={"Weft": row}, absent=["CCE"], failed={"Liger": "no driver"})
    assert [line.split() for line in str(found).splitlines()[2:]] == [
        ["Weft", "1.000", "1.000", "to", "1.000", "50.0%", "2.00"],
        ["CCE", "not", "installed"],
        ["Liger", "failed:", "no", "driver"],
    ]
    told = []
    found.tell_all(lambda *case, **figures: told.append((case, figures)))
    assert told == [
        (("a loss", "Weft", "time"), row),
        (("a loss", "CCE", "time"), {"status": "absent"}),
        (("a loss", "Liger", "time"), {"status": "failed", "error": "no driver"}),
    ]


def test_another_packages_failure_is_told_and_ours_is_raised():
    def fails():
        raise RuntimeError("0 active drivers\nand more")

    errors, failed = speed._errors({"Liger": fails, "eager torch": lambda: [torch.ones(2) / 4]}, 4, torch.ones(2))
    assert (errors, failed) == ({"eager torch": 0}, {"Liger": "RuntimeError: 0 active drivers"})
    with pytest.raises(RuntimeError, match="0 active drivers"):
        speed._errors({"Weft": fails}, 5, torch.ones(2))


def test_what_the_kernels_cost_is_told_with_their_speed():
    kept = [report for report in json.loads(KEPT.read_text()) if report["target"] == "sm_90"]
    row = speed._kernels(kept, 131072)
    gradient, statistics = (
        next(report for report in kept if report["variant"] == f"cross_entropy.{name}/bf16-contiguous")
        for name in ("gradient", "statistics")
    )
    assert row["registers"] == statistics["registers"] > gradient["registers"]
    assert (row["spill_bytes"], row["configuration"]) == (0, "8192 classes at a time, 16 warps")
    with pytest.raises(AssertionError, match="compiled once each, and 2 were found"):
        speed._kernels([report for report in kept if "losses" not in report["variant"]], 131072)


def test_a_wrong_gradient_is_not_timed():
    right = torch.ones(3)
    with pytest.raises(AssertionError, match=r"Weft: the gradient errs by 0.1, of 1 at the most"):
        speed._error("Weft", right + 0.1, right)


def test_ways_are_called_in_turn(monkeypatch):
    monkeypatch.setattr(timing, "QUICK", 0)
    called: list[str] = []
    timed = in_turn({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, Host(), rounds=2, warmup=1)
    assert "".join(called) == "ababab"
    assert {name: len(each.seconds) for name, each in timed.items()} == {"a": 2, "b": 2}


class Ticks:
    """A clock that each call of `slow` takes 2 ms on, and each of `quick` 10 µs, 1 µs where it is replayed."""

    timers = "events", "graph"

    def __init__(self, captures: bool) -> None:
        self.now, self.captures = 0.0, captures

    def slow(self) -> None:
        self.now += 2e-3

    def quick(self) -> None:
        self.now += 1e-5

    def __call__(self, way: Way) -> Callable[[], float]:
        start = self.now
        way()
        took = self.now - start
        return lambda: took

    def replay(self, way: Way, calls: int) -> Way | None:
        def graph() -> None:
            self.now += calls * 1e-6

        return graph if self.captures else None


@pytest.mark.parametrize(
    ("captures", "quick"),
    [pytest.param(True, ("graph", 1e-6), id="captured"), pytest.param(False, ("events", 1e-5), id="not-captured")],
)
def test_quick_ways_are_replayed(captures, quick):
    clock = Ticks(captures)
    timed = in_turn({"slow": clock.slow, "quick": clock.quick}, clock, rounds=4, calls=8)
    assert {name: (each.timer, pytest.approx(each.median)) for name, each in timed.items()} == {
        "slow": ("events", 2e-3),
        "quick": quick,
    }


def test_operands_taken_in_turn_are_more_than_the_l2():
    assert [timing.sets_for(nbytes) for nbytes in (1, timing.L2_BYTES - 1, timing.L2_BYTES, 2**31)] == [
        timing.L2_BYTES, 2, 1, 1,
    ]  # fmt: skip


def test_percentiles_are_those_of_the_seconds():
    figures = Timed((1.0, 2.0, 3.0, 4.0, 5.0, 6.0)).figures
    assert figures == {"seconds_median": 3.5, "seconds_p20": 2.0, "seconds_p80": 5.0, "timer": "host"}
