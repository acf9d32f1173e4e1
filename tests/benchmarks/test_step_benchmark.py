"""The benchmark of a step on a GPU takes the same steps on a CPU, of a small model and by the host's clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from weft.models import LlamaConfig

from benchmarks import test_step_speed as speed
from benchmarks.timing import Host

SMALL = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=8
)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one rank, in which nothing is compiled."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **how: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.exhaustive
def test_all_ways_take_the_same_step(alone: None) -> None:
    rows, failed = speed.of_steps(SMALL, 2, 8, "cpu", Host(), rounds=2)
    torchs = "DistributedDataParallel"
    assert not failed
    assert rows.keys() == {"Weft", "Weft, compiled", torchs, f"{torchs}, compiled"}
    for row in rows.values():
        assert row["tokens_per_second"] == 16 / float(row["seconds_median"])


def test_another_model_is_no_comparison(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "torch_step", lambda config, *of: speed.weft_step(replace(config, vocab_size=128), *of))
    with pytest.raises(AssertionError, match="DistributedDataParallel"):
        speed.of_steps(SMALL, 2, 8, "cpu", Host(), rounds=2)
