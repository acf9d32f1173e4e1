"""The z-loss and the accuracy beside the loss: their values, their cost, and gradients that they leave unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import (
    cross_entropy,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, to_global

from tests.kernels.cross_entropy.cases import given
from tests.support.pool import Pool

BOTH = {"return_z_loss": True, "return_token_accuracy": True, "z_loss": 0.1}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bf16", "fp32", "fp64"])
COMPILED = pytest.mark.parametrize(
    "compiled", [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.exhaustive)]
)
REDUCTIONS = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


def tied(N: int, V: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits with ties for the largest, and a row of zeros; targets among the largest logits, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (N, V), generator=generator).to(dtype)
    logits[0] = 0
    largest = logits == logits.amax(-1, keepdim=True)
    target = torch.multinomial(largest.double(), 1, generator=generator).squeeze(1)  # any of the largest
    target[1::5], target[2::7] = 3 % V, -100
    target[0] = 0
    return logits, target


def oracle(logits: Tensor, target: Tensor, reduction: str) -> list[Tensor]:
    """z-loss and accuracy of float64 logits."""
    counts = target != -100
    z_loss = torch.where(counts, 0.1 * logits.logsumexp(-1).square(), 0)
    correct = ((logits.argmax(-1) == target) & counts).double()
    divided = counts.sum() if reduction == "mean" else 1
    return [each if reduction == "none" else each.sum() / divided for each in (z_loss, correct)]


@REDUCTIONS
@DTYPES
@pytest.mark.parametrize("V", [1, 5, 37, 9000])
def test_z_loss_and_accuracy_follow_from_logsumexp_and_argmax(
    device: str, V: int, dtype: torch.dtype, reduction: str
) -> None:
    logits, target = tied(12, V, dtype)
    found = cross_entropy(logits.to(device), target.to(device), reduction=reduction, **BOTH)
    loss = cross_entropy(logits.to(device), target.to(device), reduction=reduction, z_loss=0.1)
    assert torch.equal(found[0], loss)
    for ours, true in zip(found[1:], oracle(logits.double(), target, reduction), strict=True):
        torch.testing.assert_close(ours.cpu().double(), true, rtol=1e-5, atol=1e-6)


def test_a_negative_zero_is_a_zero(device: str) -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0], [-1.0, -0.0, 0.0], [-2.0, -1.0, -1.5]], device=device)
    for target, expected in (([0, 1, 1], [1, 1, 1]), ([1, 2, 0], [0, 0, 0])):
        _, found = cross_entropy(
            logits, torch.tensor(target, device=device), reduction="none", return_token_accuracy=True
        )
        assert found.tolist() == expected


@pytest.mark.parametrize("more", [{}, {"weight": True, "label_smoothing": 0.2, "softcap": 7.0}], ids=["plain", "all"])
@REDUCTIONS
def test_z_loss_and_accuracy_have_no_gradient_and_change_no_gradient(
    device: str, reduction: str, more: dict[str, Any]
) -> None:
    logits, target = (each.to(device) for each in tied(12, 37, torch.float32))
    more = given(more, 37, device)
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    loss, lse, z_loss, accuracy = cross_entropy(leaves[0], target, reduction=reduction, return_lse=True, **BOTH, **more)
    assert lse.requires_grad and not z_loss.requires_grad and not accuracy.requires_grad
    (loss.sum() + z_loss.sum() + accuracy.sum()).backward()
    cross_entropy(leaves[1], target, reduction=reduction, z_loss=0.1, **more).sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-6, atol=1e-9)


@pytest.mark.few(2)
@REDUCTIONS
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_linear_cross_entropy_returns_z_loss_and_accuracy(device: str, reduction: str, weighted: bool) -> None:
    logits, target = (each.to(device) for each in tied(12, 37, torch.float32))
    more = given({"weight": True} if weighted else {}, 37, device)
    x = torch.eye(12, device=device).requires_grad_()
    weight = logits.T.contiguous().requires_grad_()
    ours = linear_cross_entropy(x, weight, target, chunk_tokens=5, reduction=reduction, **BOTH, **more)
    leaf = logits.clone().requires_grad_()
    theirs = cross_entropy(leaf, target, reduction=reduction, **BOTH, **more)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    ours[0].sum().backward()
    theirs[0].sum().backward()
    torch.testing.assert_close(weight.grad, leaf.grad.T)


SIZES = [20, 0, 17]
MESH = ProcessMesh.grid(dp=2, tp=2)


def by_group(form: str, reduction: str, dtype: torch.dtype, compiled: bool) -> list[Tensor]:
    rank = dist.get_rank()
    logits, target = tied(12, 37, dtype)
    start = sum(SIZES[:rank])
    place = {"group": dist.group.WORLD, "vocab_start": start, "vocab_size": 37, "reduction": reduction, **BOTH}
    own = logits[:, start : start + SIZES[rank]]

    def run(own: Tensor) -> Any:
        if form == "logits":
            return vocab_parallel_cross_entropy(own, target, **place)
        return vocab_parallel_linear_cross_entropy(torch.eye(12, dtype=dtype), own.T, target, chunk_tokens=5, **place)

    torch._dynamo.reset()
    return list((torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(own))


@COMPILED
@pytest.mark.parametrize("form", ["logits", "product"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_of_a_vocabulary_in_shards(pool: Pool, form: str, reduction: str, compiled: bool) -> None:
    logits, target = tied(12, 37, torch.float32)
    expected = oracle(logits.double(), target, reduction)
    every = pool.run(by_group, form, reduction, torch.float32, compiled, ranks=3)
    for found in every:
        assert all(map(torch.equal, found, every[0]))
        for ours, true in zip(found[1:], expected, strict=True):
            torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-6)


def by_layout(form: str, reduction: str, weighted: bool, compiled: bool) -> list[Tensor]:
    logits, target = tied(12, 37, torch.float32)
    rows = Layout(MESH, "dp: S(0)")
    target, more = distribute(target, rows), given({"weight": True} if weighted else {}, 37, "cpu")
    x, weight = distribute(torch.eye(12), rows), distribute(logits.T.contiguous(), Layout(MESH, "tp: S(0)"))
    laid = distribute(logits, Layout(MESH, "dp: S(0), tp: S(1)")).requires_grad_()

    def run(laid: Tensor) -> Any:
        if form == "logits":
            return cross_entropy(laid, target, reduction=reduction, **BOTH, **more)
        return linear_cross_entropy(x, weight, target, chunk_tokens=5, reduction=reduction, **BOTH, **more)

    torch._dynamo.reset()
    made = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(laid)
    if form == "logits":
        made[0].sum().backward()
    return [to_global(each.detach()) if isinstance(each, DTensor) else each for each in made]


@COMPILED
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("form", ["logits", "product"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_of_dtensors(pool: Pool, form: str, reduction: str, weighted: bool, compiled: bool) -> None:
    logits, target = tied(12, 37, torch.float32)
    more = given({"weight": True} if weighted else {}, 37, "cpu")
    expected = cross_entropy(logits, target, reduction=reduction, **BOTH, **more)
    for found in pool.run(by_layout, form, reduction, weighted, compiled, ranks=4):
        for ours, true in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, true)
