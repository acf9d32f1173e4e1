"""Communication and memory of sharded optimizers, counted, and equal to the papers' and the layouts' numbers."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.kernels.dispatch.backend import has_data
from weft.mesh import ProcessMesh
from weft.models import Llama, LlamaConfig, initialize, lay_out_batch, parallelize, record
from weft.models.step.communication import Communication
from weft.models.step.memory import predict_memory
from weft.models.train.measure import CollectiveCount
from weft.reshard import GradientSync, reshard

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=4, max_seq_len=32
)


def make(config: LlamaConfig = CONFIG) -> Llama:
    model = Llama(config)
    initialize(model, seed=3)
    return model


def backward(model: Any, mesh: ProcessMesh, plan: Any) -> None:
    tokens = torch.arange(64).reshape(8, 8) % model.config.vocab_size
    laid = lay_out_batch(mesh, plan, tokens, tokens)
    loss = cross_entropy(model(laid.tokens), laid.targets, denominator=64.0)
    reshard(loss).backward()


def bytes_of_steps(axes: dict[str, int], plan: dict[str, Any], passes: int) -> list[int]:
    """Bytes that this rank receives over dp in each of two steps, but for the loss."""
    mesh, model = ProcessMesh.grid(**axes), make()
    chosen = replace(model.parallel_plan(), **plan)
    parallelize(model, mesh, chosen)
    sync = GradientSync(model, bucket_bytes=4096)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found = []
    for _ in range(2):
        with CollectiveCount() as count:
            for _ in range(passes - 1):
                with sync.paused():
                    backward(model, mesh, chosen)
            backward(model, mesh, chosen)
            sync.wait()
            optimizer.step()
            optimizer.zero_grad()
            issued = count.take_each()
        over_dp = Communication.of({"forward": issued}).select(axis="dp")
        loss = passes * -(-2 * (mesh.axis_size("dp") - 1) // mesh.axis_size("dp")) * 4  # an all-reduce of one number
        found.append(over_dp.nbytes - loss)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("plan", "passes", "times"),
    [
        pytest.param({"zero": 0}, 1, 2, id="zero0"),
        pytest.param({"zero": 1}, 1, 2, id="zero1"),
        pytest.param({"zero": 2}, 1, 2, id="zero2"),
        pytest.param({"zero": 3}, 1, 3, id="zero3"),
        pytest.param({"zero": 3, "regather": False}, 1, 2, id="zero3-kept"),
        pytest.param({"zero": 0}, 2, 2, id="zero0-twice"),
        pytest.param({"zero": 1}, 2, 2, id="zero1-twice"),
        pytest.param({"zero": 2}, 2, 3, id="zero2-twice"),  # scattered twice, gathered once
        pytest.param({"zero": 3}, 2, 6, id="zero3-twice"),
    ],
)
@pytest.mark.parametrize(
    "axes", [pytest.param({"dp": 2}, id="dp2"), pytest.param({"dp": 4}, id="dp4", marks=pytest.mark.exhaustive)]
)
def test_bytes_over_dp_in_a_step(
    axes: dict[str, int], plan: dict[str, Any], passes: int, times: int, pool: Any
) -> None:
    n, P = axes["dp"], sum(parameter.numel() for parameter in make().parameters())
    for found in pool.run(bytes_of_steps, axes, plan, passes, ranks=n):
        assert found == [times * (n - 1) * P * 4 // n] * 2


@pytest.mark.parametrize(("plan", "times"), [({"zero": 0}, 2), ({"zero": 2}, 2), ({"zero": 3}, 3)])
def test_a_recording_without_processes_says_the_same(plan: dict[str, Any], times: int) -> None:
    n, model = 64, make(replace(CONFIG, vocab_size=128, hidden_size=64, intermediate_size=128))
    chosen, P = replace(model.parallel_plan(), **plan), sum(parameter.numel() for parameter in model.parameters())
    found = record(model, ProcessMesh.grid(dp=n), chosen, batch=(64, 8)).select(axis="dp").nbytes
    assert found - (-(-2 * (n - 1) // n)) * 4 == times * (n - 1) * P * 4 // n


def held_by(tensors: Any) -> int:
    """Bytes of the memory of tensors, each storage counted once."""
    storages = {}
    for each in tensors:
        storage = (each.to_local() if isinstance(each, DTensor) else each).untyped_storage()
        if storage.nbytes():  # a placeholder for a gradient being reduced has no memory, and no address
            storages[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
    return sum(storages.values())


def held_since(before: set[int]) -> int:
    """Bytes of float32 tensors with data, and of their gradients, without the tensors in `before`.

    The least of a few readings: a gloo thread frees its buffers a moment after the wait ends.
    """
    readings = []
    for _ in range(4):
        gc.collect()
        alive = [each for each in gc.get_objects() if isinstance(each, Tensor) and id(each) not in before]
        alive = [each for each in alive if each.dtype == torch.float32 and not each.is_meta and has_data(each)]
        readings.append(held_by([*alive, *(each.grad for each in alive if each.is_leaf and each.grad is not None)]))
        del alive
        time.sleep(0.05)
    return min(readings)


def measured(axes: dict[str, int], plan: dict[str, Any], config: LlamaConfig) -> dict[str, int]:
    """Bytes of all float32 tensors made since the model, between the passes of a step."""
    gc.collect()
    before = {id(each) for each in gc.get_objects() if isinstance(each, Tensor)}
    mesh, model = ProcessMesh.grid(**axes), make(config)
    chosen = replace(model.parallel_plan(), **plan)
    parallelize(model, mesh, chosen)
    sync = GradientSync(model, bucket_bytes=1024)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    backward(model, mesh, chosen)
    sync.wait()
    optimizer.step()
    optimizer.zero_grad()
    with sync.paused():
        backward(model, mesh, chosen)
    states = [each for state in optimizer.state.values() for each in state.values() if each.numel() > 1]
    return {"states": held_by(states), "all": held_since(before)}


# The shards are columns, which are not contiguous in memory: they cannot be views of the gathered parameter.
UNEVEN = replace(CONFIG, vocab_size=63)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axes", "config"),
    [
        pytest.param({"dp": 2}, CONFIG, id="dp2"),
        pytest.param({"dp": 4}, CONFIG, id="dp4", marks=pytest.mark.exhaustive),
        pytest.param({"dp": 2, "tp": 2}, CONFIG, id="dp2-tp2", marks=pytest.mark.exhaustive),
        pytest.param({"dp": 4}, UNEVEN, id="dp4-uneven", marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_holds_what_the_layouts_say_and_less_at_each_level(
    axes: dict[str, int], config: LlamaConfig, pool: Any
) -> None:
    totals, P = [], 4 * sum(parameter.numel() for parameter in make(config).parameters())
    mesh = ProcessMesh.grid(**axes)
    for zero in range(4):
        model = make(config)
        plan = replace(model.parallel_plan(), zero=zero)
        for rank, found in enumerate(pool.run(measured, axes, {"zero": zero}, config, ranks=mesh.size)):
            if rank == 0 or config is UNEVEN:  # even shards are as large on every rank
                said = predict_memory(model, mesh, plan, rank=rank)
            assert found["states"] == pytest.approx(said.states, rel=0.05)
            assert found["all"] == pytest.approx(said.nbytes, rel=0.05)
        if zero < 3 and "tp" not in axes and config is CONFIG:
            assert said.parameters + said.gathered == P  # nothing is held twice
        totals.append(said.nbytes)
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 4
