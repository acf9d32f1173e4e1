"""The benchmark of the layers on a GPU does its work on a CPU too, on small sizes and by the host's clock."""

from __future__ import annotations

import pytest
import torch

from benchmarks import layers
from benchmarks import test_layers_speed as speed
from benchmarks.timing import Host


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("name", layers.CASES)
def test_the_ways_to_a_layer_are_checked_and_timed(name: str, backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    monkeypatch.setattr(layers, "liger_layer", lambda case: None)  # on a CPU it has no kernels
    found = speed.of_layer(name, 6, 32, "cpu", Host(), backward=backward, rounds=2)
    assert found.rows.keys() == {"a copy", "Weft", "eager torch", "torch.compile"}
    assert found.absent == ([] if layers.CASES[name].liger is None else ["Liger"]) and not found.failed
    passes = layers.CASES[name].passes
    assert found.rows["Weft"]["bytes"] == (sum(passes) if backward else passes[0]) * 6 * 32 * 2
    assert ("gradient_error" in found.rows["Weft"]) == backward
