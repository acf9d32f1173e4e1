"""Gradients under sharded optimizers: the dtype of their sum over ranks, and how long whole gradients live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models import ParallelPlan, parallelize
from weft.reshard import GradientSync, distribute, reshard
from weft.reshard.training.gathered_modules import gathering_units

from tests.models.cases import whole
from tests.models.test_zero import CONFIG, LEVELS, Trained

RANKS = 4


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.count = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.count


def added_up(zero: int) -> tuple[Tensor, torch.dtype]:
    model, mesh = Weighted(), ProcessMesh.grid(dp=RANKS)
    parallelize(model, mesh, ParallelPlan(zero=zero))
    sync = GradientSync(model, dtype=torch.float32)
    rows = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16).repeat_interleave(2).unsqueeze(1)
    x = distribute(rows[::2].expand(RANKS, 8).contiguous(), Layout(mesh, {"dp": Shard(0)}))
    reshard(model(x).sum()).backward()
    sync.wait()
    assert model.weight.grad is not None
    return whole(model.weight.grad), model.weight.grad.dtype


@pytest.mark.parametrize("zero", LEVELS)
def test_gradients_are_added_up_in_the_dtype_that_is_asked_for(zero: int, pool: Any) -> None:
    """The sum 256 + 1 + 1 + 1 is 260 in bfloat16, if rounded once.

    Added up in bfloat16, 256 + 1 is 256, and some elements are less.
    """
    for grad, dtype in pool.run(added_up, zero, ranks=RANKS):
        assert dtype == torch.bfloat16
        assert torch.equal(grad, torch.full((8,), 260.0, dtype=torch.bfloat16))


def without_wait(zero: int) -> None:
    """Using a shard's gradient before sync.wait() is an error."""
    model, mesh = Weighted(), ProcessMesh.grid(dp=2)
    parallelize(model, mesh, ParallelPlan(zero=zero))
    sync = GradientSync(model)
    x = distribute(torch.ones(4, 8, dtype=torch.bfloat16), Layout(mesh, {"dp": Shard(0)}))
    reshard(model(x).sum()).backward()
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"gradient of weight is still on its way; call sync.wait\(\)"),
    ):
        model.weight.sub_(model.weight.grad)
    sync.wait()
    with torch.no_grad():
        model.weight.sub_(model.weight.grad)
    assert torch.equal(whole(model.weight), torch.full((8,), -3.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("zero", LEVELS)
def test_an_update_by_hand_before_wait_is_refused(zero: int, pool: Any) -> None:
    pool.run(without_wait, zero, ranks=2)


def whole_gradients_alive(zero: int, bucket_bytes: int) -> tuple[int, int]:
    """The most bytes of whole gradients in a backward pass, and of all parameters."""
    trained = Trained({"dp": 2}, CONFIG, {"zero": zero}, bucket_bytes=bucket_bytes)
    trained.step(0)
    seen: list[tuple[StorageWeakRef, int]] = []
    most = 0

    full_parameters = {each for unit in gathering_units(trained.model) for each in unit.full_parameters().values()}
    for each in full_parameters:
        each.leaf.register_hook(lambda grad: seen.append((_storage(grad), grad.to_local().nbytes)))
        each.leaf.register_post_accumulate_grad_hook(lambda _: measure())

    def measure() -> None:
        nonlocal most
        most = max(most, sum(nbytes for storage, nbytes in seen if not storage.expired()))

    trained.backward(1)
    trained.sync.wait()
    return most, sum(each.leaf.to_local().nbytes for each in full_parameters)


def _storage(grad: Any) -> StorageWeakRef:
    return StorageWeakRef(grad.to_local().untyped_storage())


@pytest.mark.parametrize("zero", LEVELS[1:])
def test_whole_gradients_live_until_their_bucket_is_sent(zero: int, pool: Any) -> None:
    bucket, largest = 4096, 48 * 32 * 4
    for most, everything in pool.run(whole_gradients_alive, zero, bucket, ranks=2):
        assert everything > 6 * (bucket + largest)
        assert 0 < most <= bucket + 2 * largest  # a bucket, and the next gradient
