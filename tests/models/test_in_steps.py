"""Sequence parallelism whose collectives overlap with products, where a table says so: same values, other transfers."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.kernels import cross_entropy
from weft.kernels.matmul.sharded import choice
from weft.kernels.matmul.sharded.choice import OverlappedOp, ShardedProduct, Timing
from weft.mesh import Layout, ProcessMesh
from weft.models import LlamaConfig, initialize, lora, parallelize
from weft.models.llama.model import Llama
from weft.models.train.measure import CollectiveCount
from weft.reshard import distribute

from tests.models.cases import whole
from tests.support.pool import Pool

B, T = 2, 8
CONFIG = LlamaConfig(
    vocab_size=48, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=T
)
# The attention's output, the gated layer's, and the head's logits.
ROWS = ((32, 32), (32, 64))
HEAD = (48, 32)
KINDS = ("reduce-scatter", "all-gather")


def table(dp: int, ranks: int, seconds: float) -> dict[ShardedProduct, Timing]:
    """A measurement of each product that may overlap. seconds: its time in steps; without overlap it takes 1."""
    products: list[tuple[OverlappedOp, tuple[int, int]]] = [("matmul_reduce_scatter", sizes) for sizes in ROWS]
    products.append(("all_gather_matmul", HEAD))
    found = [ShardedProduct.of(form, "cpu", torch.float64, ranks, B * T // dp, *sizes) for form, sizes in products]
    return {of: Timing(of=of, seconds=seconds, pair_seconds=1.0, where="here") for of in found}


def step(
    mesh: ProcessMesh,
    rows: dict[ShardedProduct, Timing],
    adapt: tuple[str, ...] = (),
    compiled: bool = False,
    **changes: Any,
) -> tuple[dict[str, Tensor], Counter[str], Counter[str]]:
    """The loss and the gradients, and the collectives issued in forward and in backward. changes: to the plan."""
    with patch.dict(choice.MEASURED, rows, clear=True):
        model: Any = Llama(CONFIG).double()
        initialize(model, seed=0)
        if adapt:
            lora(model, 2, 1.0, adapt)
        parallelize(model, mesh, replace(model.parallel_plan(), sequence=True, **changes))
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        ids = torch.randint(48, (B, T + 1), generator=torch.Generator().manual_seed(0))
        data = Layout(mesh, "dp: S(0)")
        tokens, target = (distribute(each.contiguous(), data) for each in (ids[:, :-1], ids[:, 1:]))
        # Torch compiles nothing under this dispatch mode.
        with nullcontext() if compiled else CollectiveCount() as count:
            loss = cross_entropy(run(tokens), target)
            forward = count.take() if count else Counter()
            loss.backward()
            backward = count.take() if count else Counter()
    gradients = {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": whole(loss), **gradients}, forward, backward


Issued = tuple[Counter[str], Counter[str]]


def both(dp: int, tp: int) -> tuple[Issued, Issued]:
    """Collectives issued by collective and product in turn, and by the steps that overlap."""
    mesh = ProcessMesh.grid(dp=dp, tp=tp)
    values, *pair = step(mesh, {})
    slower, *issued = step(mesh, table(dp, tp, seconds=2.0))
    assert issued == pair
    faster, *in_steps = step(mesh, table(dp, tp, seconds=0.5))
    for name, value in values.items():
        assert torch.equal(slower[name], value)
        torch.testing.assert_close(faster[name], value, rtol=1e-12, atol=1e-12)
    return (pair[0], pair[1]), (in_steps[0], in_steps[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dp", "tp"),
    [(1, 2), pytest.param(1, 4, marks=pytest.mark.exhaustive), pytest.param(2, 2, marks=pytest.mark.exhaustive)],
)
def test_a_product_measured_faster_in_steps_communicates_in_steps(pool: Pool, dp: int, tp: int) -> None:
    reductions, gathers = 2 * CONFIG.num_layers, 1
    for pair, in_steps in pool.run(both, dp, tp, ranks=dp * tp):
        for before, after in zip(pair, in_steps, strict=True):
            assert before["send"] == before["recv"] == 0 and after["send"] == after["recv"]
            assert before["all-reduce"] == after["all-reduce"]
        forward, backward = ({kind: b[kind] - a[kind] for kind in KINDS} for b, a in zip(pair, in_steps, strict=True))
        assert forward == {"reduce-scatter": reductions, "all-gather": gathers}
        assert backward == {"reduce-scatter": gathers, "all-gather": reductions}
        # An all-gather's input is gathered a second time, beside the product of its weight's gradient.
        assert [each["send"] // (tp - 1) for each in in_steps] == [reductions + gathers, reductions + 2 * gathers]


def token_losses(rows: dict[ShardedProduct, Timing]) -> tuple[dict[str, Tensor], Counter[str]]:
    """The tokens' losses from the head and their gradients, and the collectives of forward."""
    mesh = ProcessMesh.grid(dp=1, tp=2)
    with patch.dict(choice.MEASURED, rows, clear=True):
        model: Any = Llama(CONFIG).double()
        initialize(model, seed=0)
        parallelize(model, mesh, replace(model.parallel_plan(), sequence=True))
        ids = torch.randint(48, (B, T + 1), generator=torch.Generator().manual_seed(0))
        tokens, target = (distribute(each.contiguous(), Layout(mesh)) for each in (ids[:, :-1], ids[:, 1:]))
        with CollectiveCount() as count:
            losses = model(tokens, targets=target)
            forward = count.take()
            losses.sum().backward()
    gradients = {name: whole(each.grad) for name, each in model.named_parameters()}
    return {"losses": whole(losses), **gradients}, forward


def token_losses_of_both() -> tuple[Counter[str], Counter[str]]:
    """Collectives of forward without and with a table of steps; the values are equal."""
    (values, pair), (others, in_steps) = token_losses({}), token_losses(table(1, 2, seconds=0.5))
    for name, value in values.items():
        torch.testing.assert_close(others[name], value, rtol=1e-12, atol=1e-12)
    return pair, in_steps


def test_losses_of_the_head_gather_all_tokens_before_the_product(pool: Pool) -> None:
    for pair, in_steps in pool.run(token_losses_of_both, ranks=2):
        reductions = 2 * CONFIG.num_layers
        assert pair["all-gather"] == in_steps["all-gather"]  # those of the layers, of the head, and of the statistics
        assert in_steps["send"] == reductions and pair["reduce-scatter"] - in_steps["reduce-scatter"] == reductions


def left_alone() -> list[Issued]:
    """Collectives issued under recomputation with a table, under recomputation without a table, and with adapters.

    Recomputation and adapters rule out steps: the table changes nothing.
    """
    mesh, rows = ProcessMesh.grid(dp=1, tp=2), table(1, 2, seconds=0.5)
    selective: dict[str, Any] = {"recompute": "selective", "blocks": ("layers.*",)}
    adapted = step(mesh, rows, adapt=("layers.*.self_attn.o_proj", "layers.*.mlp.down_proj"))
    return [step(mesh, each, **selective)[1:] for each in (rows, {})] + [adapted[1:]]


@pytest.mark.exhaustive
def test_recomputed_blocks_and_adapted_layers_are_as_without_a_table(pool: Pool) -> None:
    for selective, without, adapted in pool.run(left_alone, ranks=2):
        assert selective == without
        assert adapted[0]["send"] == 1 and adapted[0]["reduce-scatter"] == 1 + 2 * CONFIG.num_layers


def compiled() -> int:
    """How many transfers between two ranks a compiled step starts; its values are compared, too."""
    torch._dynamo.reset()
    mesh = ProcessMesh.grid(dp=1, tp=2)
    truth, *_ = step(mesh, {})
    with patch.object(dist, "batch_isend_irecv", side_effect=dist.batch_isend_irecv) as start:
        found, *_ = step(mesh, table(1, 2, seconds=0.5), compiled=True)
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
    return start.call_count


@pytest.mark.exhaustive
def test_a_compiled_model_is_as_without_a_table(pool: Pool) -> None:
    assert pool.run(compiled, ranks=2) == [0, 0]
