"""More ranks than key heads: ranks share heads, and a step equals one process's without further collectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import attention, cross_entropy
from weft.mesh import Layout, LayoutError, ProcessMesh, Shard
from weft.models import ColwiseParallel, LlamaConfig, ParallelPlan, generate, parallelize, record
from weft.models.checks import check_tensor_parallel
from weft.models.parallel.parameter_layouts import layers_with_few_heads
from weft.models.parallel.resolve import resolve
from weft.models.train.measure import CollectiveCount
from weft.reshard import GradientSync, distribute, layout_of, reshard

from tests.models.cases import gradients_of, gradients_off, make, whole
from tests.models.stepping import observed_step
from tests.support.sample import number_of

CONFIG = LlamaConfig(
    vocab_size=31,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    max_seq_len=32,
    attention_bias=True,
)


def batch(rows: int = 3, length: int = 10) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, CONFIG.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def one_step(dp: int, tp: int, config: LlamaConfig, sequence: bool, length: int) -> dict[str, Any]:
    """Loss and gradients; also checks the collectives issued against the record that one rank made."""
    mesh = ProcessMesh.grid(dp=dp, tp=tp)
    model = make(config)
    plan = replace(model.parallel_plan(), sequence=sequence)
    rank = dist.get_rank()
    recorder = number_of((dp, tp, config.num_kv_heads, sequence)) % mesh.size
    recorded = record(model, mesh, plan, batch=(3, length), rank=rank) if rank == recorder else None
    parallelize(model, mesh, plan)
    tokens, target = (distribute(each, Layout(mesh, {"dp": Shard(0)})) for each in batch(length=length))
    found, issued = observed_step(model, partial(cross_entropy, denominator=float(target.numel())), tokens, target)
    assert recorded == (issued if rank == recorder else None)
    key = model.layers[0].self_attn.k_proj.weight
    return {
        "loss": found.loss.item(),
        "gradients": {name: whole(parameter.grad) for name, parameter in model.named_parameters()},
        "local": key.to_local().shape[0],
        "layouts": {str(layout_of(parameter)) for parameter in model.parameters()},
    }


QUICK = [(1, 4, 2, False), (2, 2, 1, True)]
EACH = [(1, tp, heads, sequence) for tp in (2, 4, 8) for heads in (1, 2) for sequence in (False, True)]
EACH += [(2, 4, heads, sequence) for heads in (1, 2) for sequence in (False, True)] + [(2, 2, 1, True)]


@pytest.mark.parametrize(
    ("dp", "tp", "heads", "sequence"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}x{case[1]}-{case[2]}-heads{'-sequence' if case[3] else ''}",
            marks=[] if case in QUICK else [pytest.mark.exhaustive],
        )
        for case in EACH
    ],
)
def test_one_loss_and_gradients_with_as_few_collectives(dp, tp, heads, sequence, pool) -> None:
    config = replace(CONFIG, num_kv_heads=heads)
    dense = make(config)
    # Sequence parallelism communicates tokens in another way where tp 8 does not divide them.
    length = 16 if tp == 8 else 10
    tokens, target = batch(length=length)
    loss = cross_entropy(dense(tokens), target)
    loss.backward()
    for found in pool.run(one_step, dp, tp, config, sequence, length, ranks=dp * tp):
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert found["local"] == config.head_dim * max(1, heads // tp)  # a rank computes its own heads alone
        assert not gradients_off(found["gradients"], gradients_of(dense))
        if heads < tp:
            assert "dp: R, tp_heads: S(0), tp_copies: R" in found["layouts"]


def over_context(cp: int, tp: int) -> dict[str, Tensor]:
    mesh = ProcessMesh.grid(cp=cp, tp=tp)
    model = make(replace(CONFIG, num_kv_heads=1))
    parallelize(model, mesh, replace(model.parallel_plan(), sequence=True, context="all_gather"))
    sync = GradientSync(model)
    given = (*batch(length=16), torch.arange(16).expand(3, 16))
    tokens, target, positions = (distribute(each, Layout(mesh, {"cp": Shard(1)})) for each in given)
    reshard(cross_entropy(model(tokens, positions=positions), target, denominator=float(target.numel()))).backward()
    sync.wait()
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("cp", "tp"), [(2, 2), pytest.param(2, 4, marks=pytest.mark.exhaustive)])
def test_the_keys_of_all_ranks_of_cp_are_read_beside_copies_of_heads(cp: int, tp: int, pool) -> None:
    alone = make(replace(CONFIG, num_kv_heads=1))
    tokens, target = batch(length=16)
    cross_entropy(alone(tokens), target).backward()
    for found in pool.run(over_context, cp, tp, ranks=cp * tp):
        assert not gradients_off(found, gradients_of(alone))


def one_block(sequence: bool) -> tuple[Counter[str], Counter[str]]:
    mesh = ProcessMesh.grid(tp=4)
    model = make(CONFIG)
    parallelize(model, mesh, replace(model.parallel_plan(), sequence=sequence))
    stream = Layout(mesh, {"tp": Shard(1)} if sequence else {})
    x = distribute(torch.randn(2, 8, CONFIG.hidden_size), stream).requires_grad_()
    half = CONFIG.head_dim // 2
    with CollectiveCount() as count:
        y = model.layers[0](x, torch.ones(8, half), torch.zeros(8, half))
        forward = count.take()
        y.backward(distribute(torch.randn(2, 8, CONFIG.hidden_size), stream))
        return forward, count.take()


@pytest.mark.exhaustive
def test_a_block_issues_the_collectives_that_it_issues_with_more_heads(pool) -> None:
    for forward, backward in pool.run(one_block, False):
        assert forward == backward == Counter({"all-reduce": 2})
    for forward, backward in pool.run(one_block, True):
        assert forward == backward == Counter({"all-gather": 2, "reduce-scatter": 2})


def generated(tp: int, heads: int) -> Tensor:
    model = make(replace(CONFIG, num_kv_heads=heads))
    if tp > 1:
        parallelize(model, ProcessMesh.grid(tp=tp))
    prompts = [torch.arange(5), torch.arange(3, 12)]
    return torch.stack([each[-8:] for each in generate(model.eval(), prompts, max_new_tokens=8, temperature=0.5)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("heads", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_generation_with_a_cache(heads: int, pool) -> None:
    alone = generated(1, heads)
    for found in pool.run(generated, 4, heads):
        assert torch.equal(found, alone)


def placed() -> None:
    """Positions and documents, which lie on the model's own mesh; and a training step of torch's fused optimizer."""
    mesh = ProcessMesh.grid(dp=2, tp=2)
    model, alone = parallelize(make(replace(CONFIG, num_kv_heads=1)), mesh), make(replace(CONFIG, num_kv_heads=1))
    tokens, target = batch(4)
    documents = (torch.arange(10) // 5).expand(4, -1).contiguous()
    positions = (torch.arange(10) % 5).expand(4, -1).contiguous()
    laid = [distribute(each, Layout(mesh, "dp: S(0)")) for each in (tokens, target, positions, documents)]
    sync, optimizers = GradientSync(model), [torch.optim.AdamW(m.parameters(), 0.1, fused=True) for m in (model, alone)]
    for _ in range(2):
        loss = reshard(cross_entropy(model(laid[0], positions=laid[2], documents=laid[3]), laid[1]))
        expected = cross_entropy(alone(tokens, positions=positions, documents=documents), target)
        torch.testing.assert_close(loss.to_local(), expected)
        loss.backward()
        expected.backward()
        sync.wait()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.exhaustive
def test_positions_documents_and_an_optimizer_of_the_two_meshes(pool) -> None:
    pool.run(placed)


def attend(heads: int, key_layout: str, query_layout: str) -> str:
    """The layout of attention's output for keys in this layout, or the error."""
    fine = ProcessMesh.grid(tp_heads=2, tp_copies=2)
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    query, key = (torch.randn(2, 6, width, generator=generator) for width in (8 * 4, heads * 4))
    laid = [distribute(x, Layout(fine, text)) for x, text in ((query, query_layout), (key, key_layout))]
    try:
        output = attention(laid[0], laid[1], laid[1], head_dim=4)
    except LayoutError as error:
        return str(error)
    torch.testing.assert_close(whole(output), attention(query, key, key, head_dim=4))
    assert isinstance(output, DTensor)
    return str(layout_of(output))


def test_attention_takes_keys_of_fewer_heads_where_each_rank_has_those_that_it_reads(pool) -> None:
    both = "tp_heads: S(2), tp_copies: S(2)"
    assert set(pool.run(attend, 2, "tp_heads: S(2)", both)) == {both}
    assert set(pool.run(attend, 1, "", both)) == {both}  # all ranks read the single head
    for found in pool.run(attend, 4, "tp_heads: S(2)", both):  # a rank has two heads, and each copy reads one of them
        assert "reshard" in found
    for found in pool.run(attend, 2, "tp_copies: S(2)", both):  # cut in the opposite order
        assert "reshard" in found or "order" in found


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ways", "works"),
    [
        pytest.param(12, 4, 6, "1, 2, 4, 12", id="neither-divides-the-other"),
        pytest.param(8, 8, 16, "1, 2, 4, 8", id="more-than-query-heads"),
        pytest.param(6, 2, 4, "1, 2, 6", id="query-heads-cut"),
    ],
)
def test_degrees_that_do_not_fit_list_those_that_do(heads: int, kv_heads: int, ways: int, works: str) -> None:
    config = replace(CONFIG, hidden_size=24 * 8, head_dim=8, num_heads=heads, num_kv_heads=kv_heads)
    model = make(replace(config, num_layers=1))
    with pytest.raises(ValueError, match=f"sizes that work: {works}$"):
        parallelize(model, ProcessMesh.grid(tp=ways))
    with pytest.raises(ValueError, match=r"degrees that work: 1, 2") as refused:
        check_tensor_parallel(config, ways)
    is_named = "num_kv_heads" in str(refused.value)
    assert is_named is bool(kv_heads % ways and (ways % kv_heads or kv_heads == heads))
    if is_named and kv_heads < heads:
        assert f"num_kv_heads {kv_heads} (nor is tp a multiple of {kv_heads})" in str(refused.value)
    around = ParallelPlan(tensor={"layers.*.mlp.up_proj": ColwiseParallel(), "lm_head": ColwiseParallel()})
    # A plan that keeps the heads whole is accepted.
    assert layers_with_few_heads(model, resolve(model, around), ways) == {}
