"""Ways are timed in turn, in an order that favours none, and where they are quick as one graph of several calls."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import timing
from benchmarks.failures import Failures
from benchmarks.timing import Device, Host, Timed, Way, in_turn, orders


def test_ways_are_called_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "QUICK", 0)
    called: list[str] = []
    ways = {name: lambda name=name: called.append(name) for name in "abc"}
    timed = in_turn(ways, Host(), rounds=3, warmup=1)
    assert "".join(called) == "abc" + "abc" + "bca" + "cab"
    assert {name: len(each.seconds) for name, each in timed.items()} == {"a": 3, "b": 3, "c": 3}


@pytest.mark.parametrize(
    ("ways", "rounds", "most"),
    [
        pytest.param(1, 3, 0, id="one-way"),
        pytest.param(2, 4, 0, id="two"),
        pytest.param(5, 10, 0, id="an-odd-number"),
        pytest.param(8, 8, 0, id="an-even-number"),
        pytest.param(8, 20, 2, id="rounds-left-over"),
        pytest.param(7, 10, 2, id="fewer-rounds-than-it-takes"),
    ],
)
def test_each_way_follows_each_about_equally_often(ways: int, rounds: int, most: int) -> None:
    """most: how far the numbers are apart."""
    names = [f"way {i}" for i in range(ways)]
    found = list(orders(names, rounds))
    assert len(found) == rounds and all(sorted(order) == names for order in found)
    follows = Counter(pair for order in found for pair in itertools.pairwise(order))
    counts = [follows[pair] for pair in itertools.permutations(names, 2)] or [0]
    assert max(counts) - min(counts) <= most


class Ticks:
    """A clock: a call of `slow` takes 4 ms, a call of `quick` 10 µs; replayed in a graph, 1 ms and 1 µs."""

    timers = "events", "graph"

    def __init__(self, captures: bool = True) -> None:
        self.now, self.captures = 0.0, captures

    def slow(self) -> None:
        self.now += 4e-3

    def quick(self) -> None:
        self.now += 1e-5

    def __call__(self, way: Way) -> Callable[[], float]:
        start = self.now
        way()
        took = self.now - start
        return lambda: took

    def replay(self, way: Way, calls: int) -> Way | None:
        seconds = {self.slow: 1e-3, self.quick: 1e-6}.get(way, 0)

        def graph() -> None:
            self.now += calls * seconds

        return graph if self.captures else None


@pytest.mark.parametrize(
    ("captures", "replayed", "slow", "quick"),
    [
        pytest.param(True, None, ("graph", 1e-3), ("graph", 1e-6), id="all-where-one-is-quick"),
        pytest.param(True, ["quick"], ("events", 4e-3), ("graph", 1e-6), id="the-slow-one-may-not-be"),
        pytest.param(True, ["slow"], ("events", 4e-3), ("events", 1e-5), id="the-quick-one-may-not-be"),
        pytest.param(False, None, ("events", 4e-3), ("events", 1e-5), id="not-captured"),
    ],
)
def test_quick_ways_are_replayed(
    captures: bool, replayed: list[str] | None, slow: tuple[str, float], quick: tuple[str, float]
) -> None:
    clock = Ticks(captures)
    ways = {"slow": clock.slow, "quick": clock.quick}
    timed = in_turn(ways, clock, rounds=4, calls=8, replayed=replayed)
    assert {name: (each.timer, pytest.approx(each.median)) for name, each in timed.items()} == {
        "slow": slow,
        "quick": quick,
    }


@pytest.mark.parametrize("calls", [0, 2, 3, 4], ids=lambda calls: f"after-{calls}-calls")
def test_a_way_that_fails_is_left_out_and_the_others_go_on(calls: int) -> None:
    left, failed, clock = iter(range(calls)), Failures(), Ticks(captures=False)

    def failing() -> None:
        if next(left, None) is None:
            raise ValueError("no more")

    timed = in_turn({"failing": failing, "slow": clock.slow}, clock, rounds=3, warmup=2, guard=failed.of)
    assert list(timed) == ["slow"] and len(timed["slow"].seconds) == 3
    assert failed == {"failing": "ValueError: no more"}
    with pytest.raises(ValueError, match="no more"):
        in_turn({"failing": failing}, clock)


class FakeGPU:
    """What of torch.cuda a capture uses. fails: whether its end does, as where the host has waited for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
        self.current, self.captures, self.fails = "the stream", 0, fails
        self.made: list[weakref.ref[Any]] = []
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *size, device, **rest: empty(1, **rest))
        for name in ("CUDAGraph", "graph", "current_stream", "set_stream", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: None)

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.current = "the capture's stream"
        self.captures += 1
        try:
            yield
        finally:
            assert all(each() is not None for each in self.made), "what was made is kept until all is captured"
            if self.fails:
                raise RuntimeError("operation failed due to a previous error during capture")
        self.current = "the stream"

    def current_stream(self) -> str:
        return self.current

    def set_stream(self, stream: str) -> None:
        self.current = stream

    def synchronize(self) -> None:
        pass

    def way(self) -> torch.Tensor:
        self.made.append(weakref.ref(made := torch.ones(1)))
        return made


def test_captured_calls_write_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(monkeypatch, fails=False)
    assert Device().replay(gpu.way, 4) is not None
    assert len(gpu.made) == 4 and not any(each() is not None for each in gpu.made)


def test_a_capture_that_fails_leaves_the_stream_as_it_was_and_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(monkeypatch, fails=True)
    clock = Device()

    def waits() -> None:
        raise ValueError("the host waits\nfor the device")

    with pytest.warns(UserWarning, match=r"not be captured \(ValueError: the host waits\): times include waits"):
        assert clock.replay(waits, 4) is None
    assert gpu.current == "the stream"
    assert clock.replay(gpu.way, 4) is None and gpu.captures == 1


def test_operands_taken_in_turn_are_more_than_the_l2() -> None:
    assert [timing.sets_for(nbytes) for nbytes in (1, timing.L2_BYTES - 1, timing.L2_BYTES, 2**31)] == [
        timing.L2_BYTES, 2, 1, 1,
    ]  # fmt: skip


def test_percentiles_are_those_of_the_seconds() -> None:
    figures = Timed((1.0, 2.0, 3.0, 4.0, 5.0, 6.0)).figures
    assert figures == {"seconds_median": 3.5, "seconds_p20": 2.0, "seconds_p80": 5.0, "timer": "host"}
