"""Hard cases of one process, repeated on shards of the vocabulary, which must give the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy

from tests.kernels.cross_entropy.cases import check_against, given, loss_and_gradient, make, shard_by_shard

V, SIZES = 31, [16, 0, 15]


def on_shards(logits: Tensor, target: Tensor, upstream: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The loss, the same bits on every shard, and the whole gradient."""
    losses, gradients = zip(*shard_by_shard(logits, target, upstream, SIZES, **options), strict=True)
    assert all(torch.equal(loss.nan_to_num(), losses[0].nan_to_num()) for loss in losses)
    return losses[0], torch.cat(gradients, -1)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=["plain", "smoothing"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_tokens(device, reduction, options):
    logits, target, upstream = make(0, V, device, reduction=reduction)
    loss, gradient = on_shards(logits, target, upstream, reduction=reduction, **options)
    assert loss.isnan() if reduction == "mean" else loss.sum() == 0
    assert gradient.shape == (0, V)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}], ids=["plain", "smoothing"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_tokens_ignored(device, reduction, options):
    logits, target, upstream = make(2, V, device, reduction=reduction)
    target[:] = -100
    loss, gradient = on_shards(logits, target, upstream, reduction=reduction, **options)
    assert loss.isnan() if reduction == "mean" else (loss == 0).all()
    assert (gradient == 0).all()


@pytest.mark.parametrize("likely", [3, 30], ids=["first-shard", "last-shard"])
@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"weight": True, "label_smoothing": 0.1}], ids=str)
def test_no_gap_of_200_is_lost_to_smoothing(device, options, likely):
    logits, target, upstream = make(4, V, device, reduction="none")
    logits[:, likely] += 200
    target[:3] = torch.tensor([likely, 5, 20])
    options = given(options, V, device) | {"reduction": "none"}
    check_against(on_shards(logits, target, upstream, **options), logits, target, upstream, **options)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x[..., :V].clone().mT.contiguous().mT, id="transposed"),
        pytest.param(lambda x: x[..., 5 : 5 + V], id="offset"),
        pytest.param(lambda x: x[..., ::2][..., :V], id="every-other-class"),
        pytest.param(lambda x: x.transpose(0, 1)[..., :V], id="transposed-tokens"),
    ],
)
def test_shards_of_any_strides(device, view):
    generator = torch.Generator().manual_seed(1)
    logits = view(torch.randn(2, 3, 2 * V, generator=generator).bfloat16().to(device))
    assert not logits.split(SIZES, -1)[2].is_contiguous()
    target = torch.randint(V, logits.shape[:-1], generator=generator).to(device)
    upstream = torch.randn(target.shape, generator=generator).to(device)
    found = on_shards(logits, target, upstream, reduction="none")
    check_against(found, logits, target, upstream, reduction="none")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_upstream_gradient_of_stride_0(device, reduction):
    logits, target, _ = make(3, V, device, reduction=reduction)
    upstream = torch.tensor(-0.37, device=device).expand(3 if reduction == "none" else ())
    found = on_shards(logits, target, upstream, reduction=reduction)
    check_against(found, logits, target, upstream, reduction=reduction)


@pytest.mark.parametrize(("reduction", "ignore_index"), [("mean", 15), ("none", 16)])
def test_a_class_of_another_shard_is_ignored(device, reduction, ignore_index):
    logits, target, upstream = make(5, V, device, torch.bfloat16, reduction)
    target[[0, 2, 4]] = ignore_index
    options = {"reduction": reduction, "ignore_index": ignore_index}
    loss, gradient = on_shards(logits, target, upstream, **options)
    check_against((loss, gradient), logits, target, upstream, **options)
    assert (gradient[target == ignore_index] == 0).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param(torch.bfloat16, {"weight": True, "label_smoothing": 0.2, "z_loss": 0.03}, id="bf16-all"),
        pytest.param(torch.float32, {}, id="fp32-plain"),
    ],
)
def test_two_runs_give_the_same_bits(device, dtype, options):
    logits, target, upstream = make(3, 257, device, dtype, "none")
    options = given(options, 257, device) | {"reduction": "none"}
    first, second = (loss_and_gradient(logits, target, upstream, **options) for _ in range(2))
    assert all(map(torch.equal, first, second))
    sharded = [shard_by_shard(logits, target, upstream, [100, 157], **options) for _ in range(2)]
    for one, other in zip(*sharded, strict=True):
        assert all(map(torch.equal, one, other))


def test_two_losses_of_the_same_logits_give_the_same_bits(device):
    """Through autograd, whichever pass made the gradient."""
    leaf, target, _ = make(7, 257, device, torch.bfloat16)
    leaf.requires_grad_()
    first, second = (torch.autograd.grad(cross_entropy(leaf, target), leaf)[0] for _ in range(2))
    assert torch.equal(first, second)
