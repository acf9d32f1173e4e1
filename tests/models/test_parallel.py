"""A model on a mesh: the fewest collectives, and the loss and gradients of one process."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh, Shard, derive_key
from weft.models import (
    ColwiseParallel,
    Llama,
    LlamaConfig,
    ParallelPlan,
    RowwiseParallel,
    VocabParallel,
    initialize,
    parallelize,
    record,
)
from weft.models.checks import check_tensor_parallel
from weft.models.parallel.resolve import resolve
from weft.models.train.measure import CollectiveCount
from weft.reshard import GradientSync, distribute, reshard
from weft.reshard.training.gradient_sync import BUCKET_BYTES

from tests.models.cases import gradients_of, gradients_off, whole
from tests.models.stepping import observed_step
from tests.support.collectives import Collectives
from tests.support.sample import number_of

CONFIG = LlamaConfig(
    vocab_size=31, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=4, max_seq_len=32
)
KEY = derive_key(3, "dropout", 0)
MESHES = [
    pytest.param(1, 1, id="1x1"),
    pytest.param(2, 1, id="2x1"),
    pytest.param(1, 2, id="1x2"),
    pytest.param(2, 2, id="2x2"),
    pytest.param(4, 1, id="4x1", marks=pytest.mark.exhaustive),
    pytest.param(1, 4, id="1x4", marks=pytest.mark.exhaustive),
]
VARIANTS = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"tie_embeddings": True}, {}, id="tied"),
    pytest.param({"attention_bias": True, "mlp_bias": True}, {}, id="biases"),
    pytest.param({}, {"sequence": True}, id="sequence"),
    pytest.param({"tie_embeddings": True, "attention_bias": True}, {"sequence": True}, id="sequence-tied-biases"),
    pytest.param({}, {"loss_parallel": False}, id="whole-logits"),
    pytest.param({}, {"recompute": "full"}, id="recomputed"),
    pytest.param({}, {"recompute": "full", "sequence": True}, id="sequence-recomputed"),
    pytest.param({}, {"recompute": "selective", "sequence": True}, id="sequence-recomputed-in-part"),
    pytest.param({"dropout": 0.2, "attention_dropout": 0.1}, {}, id="dropout"),
    pytest.param({"dropout": 0.2, "attention_dropout": 0.1}, {"sequence": True}, id="sequence-dropout"),
]


def make(config: LlamaConfig) -> Llama:
    model = Llama(config)
    initialize(model, seed=3)
    return model


def batch(rows: int = 5, length: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets [rows, length]: rows and length are uneven on purpose."""
    tokens = torch.randint(0, CONFIG.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def on(mesh: ProcessMesh, *tensors: Tensor) -> list[Tensor]:
    if mesh.size == 1:
        return list(tensors)
    return [distribute(tensor, Layout(mesh, {"dp": Shard(0)})) for tensor in tensors]


def one_step(
    dp: int, tp: int, config: LlamaConfig, plan: dict[str, Any], recorder: int, bucket_bytes: int = BUCKET_BYTES
) -> dict[str, Any]:
    """Loss, gradients and this rank's issued communication; the recorder adds the communication recorded before."""
    mesh = ProcessMesh.grid(dp=dp, tp=tp)
    model = make(config)
    chosen = replace(model.parallel_plan(), **plan)
    options = {"inputs": {"dropout_key": KEY}, "clip_norm": 1e9, "bucket_bytes": bucket_bytes}
    recorded = None
    if dist.get_rank() == recorder:
        recorded = record(model, mesh, chosen, batch=(5, 9), rank=recorder, **options)
    parallelize(model, mesh, chosen)
    sync = GradientSync(model, bucket_bytes=bucket_bytes)
    tokens, target = on(mesh, *batch())
    mean = partial(cross_entropy, denominator=float(target.numel()))
    step, communication = observed_step(model, mean, tokens, target, sync, inputs={"dropout_key": KEY}, clip_norm=1e9)
    found = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    return {"loss": step.loss.item(), "gradients": found, "issued": communication, "recorded": recorded}


@pytest.mark.parametrize(("change", "plan"), VARIANTS)
@pytest.mark.parametrize(("dp", "tp"), MESHES[1:])
def test_paddlenlp_9412_wildcard_names_lay_out_a_model_with_its_loss_gradients_and_collectives(
    dp: int, tp: int, change: dict[str, Any], plan: dict[str, Any], pool
) -> None:
    config = replace(CONFIG, **change)
    dense = make(config)
    tokens, target = batch()
    loss = cross_entropy(dense(tokens, dropout_key=KEY), target)
    loss.backward()
    # Recording takes as long as the step, so one rank records, another for each case.
    recorder = number_of((dp, tp, change, plan)) % (dp * tp)
    for rank, found in enumerate(pool.run(one_step, dp, tp, config, plan, recorder, ranks=dp * tp)):
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert found["recorded"] == (found["issued"] if rank == recorder else None)
        assert not gradients_off(found["gradients"], gradients_of(dense))


def one_block(ranks: int, plan: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    mesh = ProcessMesh.grid(tp=ranks)
    model = make(replace(CONFIG, num_layers=1))
    parallelize(model, mesh, replace(model.parallel_plan(), **plan))
    x = torch.randn(2, 8, CONFIG.hidden_size)
    stream = Layout(mesh, {"tp": Shard(1)} if plan.get("sequence") else {})
    dx = distribute(x, stream).requires_grad_()
    half = CONFIG.head_dim // 2
    with CollectiveCount() as count:
        y = model.layers[0](dx, torch.ones(8, half), torch.zeros(8, half))
        forward = count.take()
        y.backward(distribute(torch.randn(2, 8, CONFIG.hidden_size), stream))
        return forward, count.take()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_block_issues_two_all_reduces_each_way(ranks: int, pool) -> None:
    for forward, backward in pool.run(one_block, ranks, {}, ranks=ranks):
        assert forward == backward == Counter({"all-reduce": 2})


def test_paddlenlp_9412_sequence_parallel_is_derived_from_the_tensor_plan_as_pairs_at_the_same_places(pool) -> None:
    for forward, backward in pool.run(one_block, 2, {"sequence": True}, ranks=2):
        assert forward == backward == Counter({"reduce-scatter": 2, "all-gather": 2})


def losses(dp: int, tp: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step of AdamW, and the initial weights."""
    mesh = ProcessMesh.grid(dp=dp, tp=tp)
    model = parallelize(make(CONFIG), mesh, make(CONFIG).parallel_plan())
    weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    sync, optimizer = GradientSync(model), torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    found = []
    for step in range(steps):
        tokens, target = on(mesh, *batch(rows=4, length=16, seed=step % 7))
        loss = cross_entropy(model(tokens), target, denominator=float(target.numel()))
        loss = reshard(loss) if isinstance(loss, DTensor) else loss
        loss.backward()
        sync.wait()
        optimizer.step()
        optimizer.zero_grad()
        found.append(whole(loss).item())
    return found, weights


@functools.cache
def alone(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of plain tensors in one process."""
    return losses(1, 1, steps)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_fifty_steps_have_one_loss_on_every_mesh(dp: int, tp: int, pool) -> None:
    same_losses(dp, tp, 50, pool)


@pytest.mark.exhaustive
def test_a_few_steps_have_one_loss(pool) -> None:
    same_losses(2, 2, 10, pool)


def same_losses(dp: int, tp: int, steps: int, pool) -> None:
    expected, initial = alone(steps)
    for found, weights in pool.run(losses, dp, tp, steps, ranks=dp * tp):
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert found == pytest.approx(expected, rel=1e-4)
        assert found[-1] < found[0] - 0.01 * steps
        for name, weight in weights.items():
            assert torch.equal(weight, initial[name]), f"{name} starts otherwise on {dp} x {tp}"


def buckets(bucket_bytes: int) -> int:
    mesh = ProcessMesh.grid(dp=2)
    model = parallelize(make(CONFIG), mesh, make(CONFIG).parallel_plan())
    sync = GradientSync(model, bucket_bytes=bucket_bytes)
    tokens, target = on(mesh, *batch())
    with CollectiveCount() as count:
        reshard(cross_entropy(model(tokens), target, denominator=45.0)).backward()
        sync.wait()
    return count.issued["all-reduce"] - 1  # the loss's own


def test_data_parallelism_adds_the_gradients_buckets_alone(pool) -> None:
    parameters = len(list(make(CONFIG).parameters()))
    assert pool.run(buckets, 2**20, ranks=2) == [1, 1]
    assert pool.run(buckets, 1, ranks=2) == [parameters, parameters]


def blocks_on_a_grid() -> list[list[list[str]]]:
    return [block_on_a_grid(False, 2**20), block_on_a_grid(False, 1), block_on_a_grid(True, 2**20)]


def block_on_a_grid(sequence: bool, bucket_bytes: int) -> list[list[str]]:
    """Collectives in order: of a block's forward, of its backward and of the gradients' synchronization."""
    mesh = ProcessMesh.grid(dp=2, tp=2)
    model = make(replace(CONFIG, num_layers=1))
    parallelize(model, mesh, replace(model.parallel_plan(), sequence=sequence))
    sync = GradientSync(model.layers[0], bucket_bytes=bucket_bytes)
    stream = Layout(mesh, {"dp": Shard(0), "tp": Shard(1)} if sequence else {"dp": Shard(0)})
    x = distribute(torch.randn(3, 7, CONFIG.hidden_size), stream).requires_grad_()
    half = CONFIG.head_dim // 2
    phases = []
    with Collectives() as seen:
        y = model.layers[0](x, torch.ones(7, half), torch.zeros(7, half))
        phases.append(len(seen.kinds))
        y.backward(distribute(torch.randn(3, 7, CONFIG.hidden_size), stream))
        phases.append(len(seen.kinds))
        sync.wait()
    return [seen.kinds[: phases[0]], seen.kinds[phases[0] : phases[1]], seen.kinds[phases[1] :]]


@pytest.mark.exhaustive
def test_data_parallelism_leaves_a_block_as_it_is_but_for_one_bucket(pool) -> None:
    for one_bucket, small_buckets, sequence in pool.run(blocks_on_a_grid):
        assert one_bucket == [["all-reduce"] * 2, ["all-reduce"] * 2, ["all-reduce"]]
        assert small_buckets == [["all-reduce"] * 2, ["all-reduce"] * (2 + 9), []]  # 9 parameters
        forward, backward, after = sequence
        assert forward == backward == ["all-gather", "reduce-scatter"] * 2
        assert after == ["all-reduce"] * 2  # over dp for the projections; over dp and tp for the norms


@pytest.mark.exhaustive
@pytest.mark.parametrize("bucket_bytes", [1, 3_000, 10_000])
@pytest.mark.parametrize(("dp", "tp", "plan"), [(2, 1, {}), (2, 2, {}), (2, 2, {"sequence": True})])
def test_buckets_are_predicted_by_the_phase_in_which_they_leave(dp, tp, plan, bucket_bytes, pool) -> None:
    recorder = number_of((dp, tp, plan, bucket_bytes)) % (dp * tp)
    found = pool.run(one_step, dp, tp, CONFIG, plan, recorder, bucket_bytes, ranks=dp * tp)[recorder]
    assert found["recorded"] == found["issued"]


def laid_out_then_filled(dp: int, tp: int) -> dict[str, Tensor]:
    mesh = ProcessMesh.grid(dp=dp, tp=tp)
    with torch.device("meta"):
        model = Llama(CONFIG)
    model = parallelize(model, mesh, model.parallel_plan()).to_empty(device="cpu")
    initialize(model, seed=3)
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_paddle_62125_initial_weights_drawn_shard_by_shard_are_those_of_one_process(dp: int, tp: int, pool) -> None:
    expected = dict(make(CONFIG).named_parameters())
    for weights in pool.run(laid_out_then_filled, dp, tp, ranks=dp * tp):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name


def test_a_plan_that_does_not_fit_is_refused_on_one_process_too() -> None:
    plan = ParallelPlan(tensor={"layers.*.mlp.upproj": ColwiseParallel()})
    with pytest.raises(ValueError, match="matches no module"):
        parallelize(make(CONFIG), ProcessMesh.grid(dp=1, tp=1), plan)


def test_a_mesh_of_one_process_leaves_the_model_as_it_is() -> None:
    model = make(CONFIG)
    before = list(model.parameters())
    assert parallelize(model, ProcessMesh.grid(dp=1, tp=1), model.parallel_plan()) is model
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        pytest.param(
            {"layers.*.mlp.upproj": ColwiseParallel()},
            r"'layers\.\*\.mlp\.upproj' matches no module of Llama; the nearest names are .*mlp\.up_proj",
            id="matches-nothing",
        ),
        pytest.param(
            {"layers.*.mlp.up_proj": ColwiseParallel(), "*up_proj": RowwiseParallel()},
            r"'layers\.\*\.mlp\.up_proj' and '\*up_proj' give 'layers\.0\.mlp\.up_proj' two styles",
            id="two-styles",
        ),
        pytest.param({"norm": ColwiseParallel()}, r"to 'norm', a RMSNorm; that style is for Linear", id="not-a-linear"),
        pytest.param({"lm_head": VocabParallel()}, r"to 'lm_head', a Head; .* for Embedding", id="not-an-embedding"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(tensor: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(Llama(CONFIG), ParallelPlan(tensor=tensor))


def test_paddlenlp_9412_shared_weights_are_found_by_identity_and_need_styles_that_agree() -> None:
    model = Llama(replace(CONFIG, tie_embeddings=True))
    plan = ParallelPlan(tensor={"embed_tokens": VocabParallel()})
    with pytest.raises(ValueError, match=r"'embed_tokens.weight' and 'lm_head.weight' are one tied parameter"):
        record(model, ProcessMesh.grid(tp=2), plan, batch=(5, 9))


def test_degrees_that_do_not_divide_list_those_that_do() -> None:
    check_tensor_parallel(CONFIG, 2)
    check_tensor_parallel(replace(CONFIG, num_kv_heads=1), 4)
    with pytest.raises(ValueError, match=r"tp=3 does not divide num_heads 4 .*degrees that work: 1, 2, 4"):
        check_tensor_parallel(CONFIG, 3)
