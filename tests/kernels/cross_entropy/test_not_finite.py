"""Infinite and NaN logits at the target, beside it, away from it and in a whole row, against torch.

In a row with an ignored target Weft's loss and gradient are 0. Torch's loss is 0, too; its gradient is NaN where
the row's softmax is.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.kernels import cross_entropy, linear_cross_entropy, vocab_parallel_cross_entropy
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, reshard, to_global

from tests.kernels.cross_entropy.cases import ASKED, DTYPES, given, shard_by_shard, torch_loss_and_gradient
from tests.support.pool import Pool

V, TARGET = 9, 5  # class 4 has a weight of 0
VALUES = (torch.nan, torch.inf, -torch.inf)
PLACES: dict[str, Any] = {
    "target": [TARGET],
    "before the target": [TARGET - 1],
    "after the target": [TARGET + 1],
    "first": [0],
    "last": [V - 1],
    "others": [c for c in range(V) if c != TARGET],
    "all": list(range(V)),
}
OPTIONS: list[Any] = [pytest.param({}, id="plain"), *ASKED]
ALL_DTYPES = [*DTYPES, pytest.param(torch.float64, id="fp64")]
UPSTREAM = 0.7


def rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A row for each value at each place; then the same rows with an ignored target; and a finite row."""
    logits = torch.randn(len(VALUES) * len(PLACES), V, generator=torch.Generator().manual_seed(1))
    for i, value in enumerate(VALUES):
        for j, columns in enumerate(PLACES.values()):
            logits[i * len(PLACES) + j, columns] = value
    target = torch.full((len(logits),), TARGET)
    finite = torch.linspace(-1, 1, V).unsqueeze(0)
    return torch.cat([logits, logits, finite]).to(dtype), torch.cat([target, 0 * target - 100, target[:1]])


def expected(logits: Tensor, target: Tensor, upstream: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Torch's, in float64; the gradient of ignored rows is 0."""
    loss, gradient = torch_loss_and_gradient(logits.double(), target, upstream, **options)
    return loss, torch.where((target == -100).unsqueeze(1), 0, gradient)


def assert_same(found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Asserts torch's NaN and infinities, and torch's finite numbers up to the resolution of `dtype`."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    for ours, true in zip(found, truth, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=8 * eps, atol=8 * eps, equal_nan=True)


def loss_and_gradient(logits: Tensor, target: Tensor, upstream: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf, target, **options)
    return loss.detach(), torch.autograd.grad(loss, leaf, upstream.to(loss.dtype))[0]


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_each_row_is_as_in_torch(device, options, dtype):
    logits, target = (each.to(device) for each in rows(dtype))
    options = given(options, V, device) | {"reduction": "none"}
    upstream = torch.full((len(target),), UPSTREAM, device=device)
    assert_same(
        loss_and_gradient(logits, target, upstream, **options), expected(logits, target, upstream, **options), dtype
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_reduced_loss_is_as_in_torch(device, portion, reduction):
    """No row is ignored, and forward may make the gradient: for the guessed number and for a number not guessed."""
    generator = torch.Generator().manual_seed(2)
    target = torch.full((3,), TARGET, device=device)
    cases = product((torch.float32, torch.float64, torch.bfloat16), VALUES, PLACES, (1.0, UPSTREAM))
    for dtype, value, place, number in portion.of(cases, every=9):
        logits = torch.randn(3, V, generator=generator).to(dtype).to(device)
        logits[1, PLACES[place]] = value
        upstream = torch.tensor(number, device=device)
        found = loss_and_gradient(logits, target, upstream, reduction=reduction)
        assert_same(found, expected(logits, target, upstream, reduction=reduction), dtype)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("options", [OPTIONS[0], *OPTIONS[1:6]])
def test_a_reduced_loss_does_not_look_at_ignored_rows(device, options, value, reduction, dtype):
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    logits[0], logits[2, 0] = value, value
    target = torch.tensor([-100, TARGET, -100, 0], device=device)
    options = given(options, V, device) | {"reduction": reduction}
    upstream = torch.tensor(UPSTREAM, device=device)
    loss, gradient = loss_and_gradient(logits, target, upstream, **options)
    assert loss.isfinite() and gradient.isfinite().all()
    assert_same((loss, gradient), expected(logits, target, upstream, **options), dtype)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_one_class(device, portion, reduction):
    target = torch.zeros(3, dtype=torch.int64, device=device)
    upstream = torch.full((3,) if reduction == "none" else (), UPSTREAM, device=device)
    dtypes, options_of_a_loss = (
        (torch.float32, torch.float64, torch.bfloat16),
        ({}, {"label_smoothing": 0.1}, {"z_loss": 0.01}),
    )
    for dtype, value, options in portion.of(product(dtypes, VALUES, options_of_a_loss), every=9):
        logits = torch.tensor([[0.5], [value], [2.0]], dtype=dtype, device=device)
        found = loss_and_gradient(logits, target, upstream, reduction=reduction, **options)
        assert_same(found, expected(logits, target, upstream, reduction=reduction, **options), dtype)


@pytest.mark.parametrize("sizes", [[9], [4, 5], [5, 4], [0, 9], [1, 3, 1, 4]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_on_shards_of_the_vocabulary(device, options, dtype, sizes):
    logits, target = (each.to(device) for each in rows(dtype))
    options = given(options, V, device) | {"reduction": "none"}
    upstream = torch.full((len(target),), UPSTREAM, device=device)
    results = shard_by_shard(logits, target, upstream, sizes, **options)
    found = results[0][0], torch.cat([part for _, part in results], -1)
    assert_same(found, expected(logits, target, upstream, **options), dtype)


def on_ranks(how: str, options: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Loss and whole gradient of rows whose vocabulary is sharded over the ranks."""
    (logits, target), ranks = rows(dtype), dist.get_world_size()
    options, mesh = given(options, V, "cpu") | {"reduction": "none"}, ProcessMesh.grid(tp=ranks)
    whole = distribute(logits, Layout(mesh, "tp: S(1)"))
    if how == "layout":
        leaf = whole.requires_grad_()
        loss = cross_entropy(leaf, target, **options)
        local = reshard(loss).to_local()
    else:
        leaf = whole.to_local().clone().requires_grad_()
        start = Layout(mesh, "tp: S(1)").local_slices(tuple(logits.shape), dist.get_rank())[1].start
        local = loss = vocab_parallel_cross_entropy(
            leaf, target, group=dist.group.WORLD, vocab_start=start, vocab_size=V, **options
        )
    loss.sum().backward()
    return local.detach(), to_global(leaf.grad) if how == "layout" else leaf.grad


@pytest.mark.parametrize("how", ["layout", "group"])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]])
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_on_ranks(pool: Pool, how, options, dtype):
    results = pool.run(on_ranks, how, options, dtype, ranks=2)
    logits, target = rows(dtype)
    gradient = results[0][1] if how == "layout" else torch.cat([part for _, part in results], -1)
    options = given(options, V, "cpu") | {"reduction": "none"}
    truth = expected(logits, target, torch.ones(len(target)), **options)
    for loss, _ in results:
        assert_same((loss, gradient), truth, dtype)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("columns", [[TARGET], [0], [V - 1], list(range(V))], ids=["target", "first", "last", "all"])
def test_of_a_linear_layer(device, columns, value, options, reduction, dtype):
    """The bias is not finite. The target is a class of such a bias, a finite class, or ignored."""
    generator = torch.Generator().manual_seed(4)
    x, weight, bias = (torch.randn(*size, generator=generator) for size in ((5, 3), (V, 3), (V,)))
    bias[columns] = value
    target = torch.tensor([TARGET, -100, 2, TARGET, 7], device=device)
    leaves = [each.to(dtype).to(device).requires_grad_() for each in (x, weight, bias)]
    options = given(options, V, device) | {"reduction": reduction}
    upstream = torch.full((5,) if reduction == "none" else (), UPSTREAM, device=device)
    loss = linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], chunk_tokens=2, **options)
    found = torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = torch.nn.functional.linear(*wide)
    true_loss, dlogits = expected(logits.detach(), target, upstream, **options)
    truth = torch.autograd.grad(logits, wide, dlogits)
    for ours, true in zip((loss.detach(), *found), (true_loss, *truth), strict=True):
        eps = max(torch.finfo(ours.dtype).eps, torch.finfo(torch.float32).eps)
        torch.testing.assert_close(ours.double(), true, rtol=16 * eps, atol=16 * eps, equal_nan=True)
