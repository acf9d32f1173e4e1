"""Both losses, whole and sharded, on vocabularies of real models and at the limits of blocks and integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.kernels import linear_cross_entropy, vocab_parallel_linear_cross_entropy

from tests.kernels.cross_entropy.cases import assert_as_good_as_eager, check_against, shard_by_shard
from tests.kernels.linear_cross_entropy.cases import check, make
from tests.support.pool import Pool

SIZES = [
    50257,
    65537,
    *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (65535, 65536, 128256, 151936)),
]
SHARDS = 4
SMALL = [pytest.param(1, 8, id="1-over-8"), pytest.param(5, 8, id="5-over-8"), pytest.param(31, 4, id="31-over-4")]


def cut(V: int, shards: int) -> list[int]:
    """The sizes of torch.chunk, the missing ones 0."""
    sizes = [len(part) for part in torch.arange(V).chunk(shards)]
    return sizes + [0] * (shards - len(sizes))


def boundaries(V: int, shards: int) -> Tensor:
    """The first and the last class of every shard that has classes."""
    stops = torch.tensor(cut(V, shards)).cumsum(0)
    return torch.cat([torch.tensor([0]), stops - 1, stops]).clamp(max=V - 1).unique()


def logits_at_boundaries(V: int, shards: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 logits, a target at each boundary and an ignored target, and upstream gradients."""
    generator = torch.Generator().manual_seed(V)
    target = torch.cat([boundaries(V, shards), torch.tensor([-100])])
    logits = (3 * torch.randn(len(target), V, generator=generator)).bfloat16()
    upstream = torch.randn(len(target), generator=generator)
    return logits.to(device), target.to(device), upstream.to(device)


@pytest.mark.parametrize("V", SIZES)
def test_whole_logits(device, V):
    logits, target, upstream = logits_at_boundaries(V, 1, device)
    assert_as_good_as_eager(logits, target, upstream, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("V", SIZES)
def test_shards_with_targets_at_each_boundary(device, V):
    check_shards(device, V, SHARDS)


@pytest.mark.few(2)
@pytest.mark.parametrize(("V", "shards"), SMALL)
def test_small_shards_with_targets_at_each_boundary(device, V, shards):
    check_shards(device, V, shards)


def check_shards(device, V, shards):
    logits, target, upstream = logits_at_boundaries(V, shards, device)
    results = shard_by_shard(logits, target, upstream, cut(V, shards), reduction="none")
    assert all(torch.equal(loss, results[0][0]) for loss, _ in results)
    gradient = torch.cat([part for _, part in results], -1)
    check_against((results[0][0], gradient), logits, target, upstream, reduction="none")


@pytest.mark.parametrize("V", SIZES)
def test_a_product(device, V):
    case = make((3,), V, device, torch.bfloat16, H=4)
    case.target[1:] = torch.tensor([0, V - 1])
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target, chunk_tokens=2)
    check(case, loss.detach(), list(torch.autograd.grad(loss, case.leaves(), case.upstream)))


def by_shards(V: int) -> tuple[Any, ...]:
    rank, shards = dist.get_rank(), dist.get_world_size()
    case = make((len(boundaries(V, shards)),), V, "cpu", torch.bfloat16, H=4)
    sizes = cut(V, shards)
    start = sum(sizes[:rank])
    x = case.input.detach().requires_grad_()
    weight = case.linear_weight.detach()[start : start + sizes[rank]].requires_grad_()
    loss = vocab_parallel_linear_cross_entropy(
        x, weight, boundaries(V, shards), group=dist.group.WORLD, vocab_start=start, vocab_size=V, chunk_tokens=3
    )
    return loss.detach(), *torch.autograd.grad(loss, (x, weight), case.upstream)


@pytest.mark.parametrize(("V", "shards"), [*SMALL, (50257, SHARDS), (65537, SHARDS)])
def test_shards_of_a_product_with_targets_at_each_boundary(pool: Pool, V, shards):
    results = pool.run(by_shards, V, ranks=shards)
    case = make((len(boundaries(V, shards)),), V, "cpu", torch.bfloat16, H=4)._replace(target=boundaries(V, shards))
    assert all(torch.equal(loss, results[0][0]) and torch.equal(dx, results[0][1]) for loss, dx, _ in results)
    check(case, results[0][0], [results[0][1], torch.cat([each[2] for each in results])])
