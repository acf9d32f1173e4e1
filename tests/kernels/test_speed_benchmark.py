"""The benchmark of the losses on a GPU does its work on a CPU too, on small sizes and by the host's clock."""

from __future__ import annotations

import pytest
import torch

from benchmarks import test_cross_entropy_speed as speed
from benchmarks.timing import Timed, host, in_turn


def test_the_losses_are_compared_and_timed(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    found = speed.of_logits(70, 256, "cpu", host, rounds=3) | speed.of_products(70, 256, 8, "cpu", host, rounds=3)
    assert {"Weft", "Weft, one shard", "eager torch", "three GEMMs", "a copy of the logits"} <= found.keys()
    for row in found.values():
        assert not row or 0 < row["seconds_p20"] <= row["seconds"] <= row["seconds_p80"]
    assert "not installed" in speed.told("title", {"CCE": {}})
    assert "50.0%" in speed.told("title", {"Weft": {"seconds": 1, "seconds_p20": 1, "seconds_p80": 1, "roofline": 0.5}})


def test_a_wrong_gradient_is_not_timed():
    right = torch.ones(3)
    with pytest.raises(AssertionError, match=r"Weft: the gradient errs by 0.1, of 1 at the most"):
        speed._compare("Weft", right + 0.1, right)


def test_ways_are_called_in_turn():
    called: list[str] = []
    timed = in_turn({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, host, rounds=2, warmup=1)
    assert "".join(called) == "ababab"
    assert {name: len(each.seconds) for name, each in timed.items()} == {"a": 2, "b": 2}
    assert Timed((1.0, 2.0, 3.0, 4.0, 5.0, 6.0)).spread == (2.0, 5.0)
    assert Timed((1.0, 2.0, 9.0)).median == 2
