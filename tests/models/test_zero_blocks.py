"""A block with zero=3 gathers, drops and prefetches parameters around its call; also compiled, and with adapters."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh
from weft.models import LlamaConfig, lay_out_batch, lora, merge_lora, parallelize
from weft.reshard import GradientSync, drop_gathered
from weft.reshard.training import gathered_modules, unit
from weft.reshard.training.full_parameters import contiguous_shard_slices
from weft.reshard.training.gathering import GatherBatch

from tests.models.cases import whole
from tests.models.test_zero import CONFIG, LEVELS, Trained, assert_same, batch, make, truth_of

SMALL = replace(CONFIG, num_layers=3)


def held(model: Any) -> int:
    """Bytes of gathered parameters in memory."""
    units = gathered_modules.gathering_units(model)
    full_parameters = {full for unit in units for full in unit.full_parameters().values()}
    return sum(each.leaf.to_local().untyped_storage().nbytes() for each in full_parameters)


def held_around_a_step(zero: int) -> list[tuple[str, int]]:
    trained = Trained({"dp": 2}, SMALL, {"zero": zero})
    found = [("at first", held(trained.model))]
    trained.backward(0)
    found.append(("after backward", held(trained.model)))
    trained.sync.wait()
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    found.append(("after a step", held(trained.model)))
    drop_gathered(trained.model)
    found.append(("dropped", held(trained.model)))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", LEVELS[1:])
def test_zero_1_and_2_keep_full_parameters_between_calls_and_zero_3_keeps_none(zero: int, pool: Any) -> None:
    everything = sum(parameter.numel() * 4 for parameter in make(SMALL).parameters())
    stays = everything if zero < 3 else 0
    for found in pool.run(held_around_a_step, zero, ranks=2):
        assert dict(found) == {"at first": 0, "after backward": stays, "after a step": stays, "dropped": 0}


def events(steps: int) -> list[list[str]]:
    """For each step, in order: the gathers that start, and the blocks that compute, in forward and in backward."""
    trained = Trained({"dp": 2}, SMALL, {"zero": 3})
    seen: list[str] = []

    class Noted(GatherBatch):
        def __init__(self, gathers: Any) -> None:
            super().__init__(gathers)
            self.shards = {id(each.shard) for each in gathers}

        def start(self) -> None:
            seen.extend(f"gather {i}" for i, parameters in enumerate(of_layer) if self.shards & parameters)
            super().start()

    of_layer = [{id(p) for p in layer.parameters()} for layer in trained.model.layers]
    for i, layer in enumerate(trained.model.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: seen.append(f"forward {i}"))
        layer.mlp.down_proj.register_full_backward_pre_hook(lambda *_, i=i: seen.append(f"backward {i}"))
    found = []
    with patch.object(unit, "GatherBatch", Noted):
        for step in range(steps):
            trained.step(step)
            found.append(list(seen))
            seen.clear()
    return found


@pytest.mark.exhaustive
def test_the_next_blocks_gather_is_under_way_while_a_block_computes(pool: Any) -> None:
    ahead = ["gather 0", "gather 1", "forward 0", "gather 2", "forward 1", "forward 2"]
    back = ["gather 2", "gather 1", "backward 2", "gather 0", "backward 1", "backward 0"]
    for found in pool.run(events, 3, ranks=2):
        assert found[2] == ahead + back  # from the second step on the order is known


def changed_under_way(zero: int) -> None:
    """A block's shards change while their gather is in flight: the block computes with the new values, which stay."""
    trained = Trained({"dp": 2}, SMALL, {"zero": zero})
    tokens = lay_out_batch(trained.mesh, trained.plan, *batch(0)).tokens
    layers = list(trained.model.layers)
    before = [whole(parameter) for parameter in layers[1].parameters()]

    def halve(*_: object) -> None:
        for parameter in layers[1].parameters():
            parameter.to_local().mul_(0.5)

    with torch.no_grad():
        for _ in range(2):
            trained.model(tokens)  # the order is known
        drop_gathered(trained.model)
        handle = layers[0].register_forward_pre_hook(halve)
        changed = whole(trained.model(tokens))
        handle.remove()
        for parameter, old in zip(layers[1].parameters(), before, strict=True):
            assert torch.equal(whole(parameter), 0.5 * old)
        drop_gathered(trained.model)
        assert torch.equal(whole(trained.model(tokens)), changed)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_shard_changed_during_the_gather_is_gathered_again(zero: int, pool: Any) -> None:
    pool.run(changed_under_way, zero, ranks=2)


@pytest.mark.parametrize(
    ("shape", "shard", "found"),
    [
        pytest.param((8, 6), "dp: S(0)", (slice(2, 4), slice(0, 6)), id="rows"),
        pytest.param((7, 6), "dp: S(0)", (slice(2, 4), slice(0, 6)), id="uneven-rows"),
        pytest.param((1, 8), "dp: S(1)", (slice(0, 1), slice(2, 4)), id="of-one-row"),
        pytest.param((8, 8), "dp: S(1)", None, id="columns"),
        pytest.param((3, 6), "dp: S(0)", (slice(1, 2), slice(0, 6)), id="fewer-rows-than-ranks"),
    ],
)
def test_which_shards_are_stretches_of_memory(
    shape: tuple[int, ...], shard: str, found: tuple[slice, ...] | None
) -> None:
    mesh = ProcessMesh.grid(dp=4)
    assert contiguous_shard_slices(Layout(mesh, shard), Layout(mesh, {}), shape, rank=1) == found


def compiled_steps(axes: dict[str, int], config: LlamaConfig) -> tuple[dict[str, Tensor], list[float]]:
    torch.compiler.reset()
    trained = Trained(axes, config, {"zero": 3, "sequence": "tp" in axes})
    for layer in trained.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    norms = [trained.step(step) for step in range(3)]
    return trained.weights(), norms


@pytest.mark.exhaustive  # the sample has recomputed and compiled blocks on a mesh, and these blocks eager
@pytest.mark.parametrize(
    ("axes", "layers"),
    [
        pytest.param({"dp": 2}, 1, id="dp2-one-layer"),
        pytest.param({"dp": 2, "tp": 2}, 2, id="dp2-tp2"),
    ],
)
def test_blocks_compile(axes: dict[str, int], layers: int, pool: Any) -> None:
    config = replace(CONFIG, num_layers=layers)
    for found in pool.run(compiled_steps, axes, config, ranks=ProcessMesh.grid(**axes).size):
        assert_same(found, truth_of(config))


def adapted(zero: int | None, after: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Weights after two steps of adapters, folded in."""

    def give(model: Any) -> None:
        lora(model, rank=2, alpha=4.0, targets=["layers.*.self_attn.q_proj", "layers.*.mlp.down_proj"], seed=1)

    axes = {"dp": 2, "tp": 2} if zero is not None else {"dp": 1}
    plan = {"zero": zero or 0}
    if after:
        mesh, model = ProcessMesh.grid(**axes), make()
        chosen = replace(model.parallel_plan(), **plan)
        give(parallelize(model, mesh, chosen))
        trained = Trained.__new__(Trained)
        trained.mesh, trained.model, trained.plan = mesh, model, chosen
        trained.sync = GradientSync(model)
        trained.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    else:
        trained = Trained(axes, CONFIG, plan, prepare=give, optimizer=lambda given: torch.optim.SGD(given, lr=1.0))
    for step in range(2):
        trained.step(step)
    merge_lora(trained.model)
    placed = [str(p.placements) for p in trained.model.parameters() if isinstance(p, DTensor)]
    return {name: whole(parameter) for name, parameter in trained.model.named_parameters()}, placed


adapted_alone = functools.cache(functools.partial(adapted, None, False))


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("zero", LEVELS[1:])
def test_adapters_train_beside_sharded_weights(zero: int, after: bool, pool: Any) -> None:
    truth, _ = adapted_alone()
    base = make().state_dict()
    assert any(not torch.equal(truth[name], base[name]) for name in truth)
    for found, _ in pool.run(adapted, zero, after, ranks=4):
        for name, weight in truth.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
