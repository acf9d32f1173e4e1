"""The roll call with a store that does not answer, or is gone; test_train_ends.py has the roll call in runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist
from weft.models.train import agreement
from weft.models.train.agreement import RollCall, is_silence


class Store:
    """Like torch's store, with the same action for each call."""

    def __init__(self, answer: Callable[[], object]) -> None:
        self._answer = answer

    def add(self, *arguments: object) -> object:
        return self._answer()

    set = check = get = add


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], agreement.Unanswered]:
    """The error that rank 1 of 2 raises after 4 s of silence, with a store whose calls run the given function."""
    monkeypatch.setattr(agreement, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(agreement, "STORE_SECONDS", 0.2)
    monkeypatch.setattr(agreement.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(agreement.dist, "get_world_size", lambda: 2)

    def called(answer: Callable[[], object]) -> agreement.Unanswered:
        monkeypatch.setattr(agreement, "_get_default_store", lambda: Store(answer))
        with RollCall(lambda: "step 3, forward", "rank 0") as roll:
            return roll.call(4)

    return called


def test_a_store_that_does_not_answer_is_given_up(call: Callable[..., agreement.Unanswered]) -> None:
    never, begun = threading.Event(), time.monotonic()

    def silent() -> object:
        never.wait()
        raise RuntimeError("the test is over")

    try:
        found = call(silent)
        assert time.monotonic() - begun < 60  # it would be for ever
    finally:
        never.set()
    assert str(found) == "rank 0 did not answer for 4 s, while rank 1 waited in step 3, forward"
    assert found.is_printed_here


def test_of_a_store_that_is_gone_its_process_has_told(call: Callable[..., agreement.Unanswered]) -> None:
    def gone() -> object:
        raise RuntimeError("Connection reset by peer")

    assert not call(gone).is_printed_here


@pytest.mark.exhaustive
def test_every_roll_call_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks ask one after the other; before the second question, a rank falls silent and a rank goes on."""
    monkeypatch.setattr(agreement, "EVERY_SECONDS", 0.05)
    monkeypatch.setattr(agreement, "ANSWER_SECONDS", 1.0)
    store, activities = dist.HashStore(), ["step 3, forward"] * 3
    monkeypatch.setattr(agreement, "_get_default_store", lambda: store)
    monkeypatch.setattr(agreement.dist, "get_world_size", lambda: 3)
    calls = []
    for rank in range(3):
        monkeypatch.setattr(agreement.dist, "get_rank", lambda rank=rank: rank)
        calls.append(RollCall(lambda rank=rank: activities[rank], "rank 0"))
    with calls[0], calls[1]:
        with calls[2]:
            first = calls[0].call(4)
            assert "all other ranks do too" in str(first) and first.is_printed_here
        activities[1] = "step 4, forward"
        second = calls[0].call(4)
        assert str(second).startswith("rank 2 did not answer for 4 s") and not second.is_printed_here
        third = calls[1].call(4)
        assert "while the others waited in step 4, forward" in str(third)


@pytest.mark.parametrize(
    ("said", "silent"),
    [
        ("Timed out waiting 4000ms for recv operation to complete", True),
        ("Application timeout caused pair closure", True),
        ("Connection closed by peer [127.0.0.1]:1234", False),
    ],
)
def test_gloos_error_tells_a_silent_rank(said: str, silent: bool) -> None:
    assert is_silence(RuntimeError(said)) == silent
