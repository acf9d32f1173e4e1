"""Failures of other libraries, each by name: `test_no_…`."""

from __future__ import annotations

import pytest
import torch
from weft.kernels import cross_entropy
from weft.kernels.cross_entropy import function
from weft.kernels.cross_entropy.options import Options

from tests.kernels.cross_entropy.cases import (
    BLOCK,
    DTYPES,
    SPLITS,
    assert_as_good_as_eager,
    check_against,
    loss_and_gradient,
    make,
    shard_by_shard,
    torch_loss_and_gradient,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_anchor_1_no_row_takes_the_upstream_gradient_of_another(device, dtype):
    logits, target, _ = make(5, 257, device, dtype)
    upstream = torch.tensor([0.0, 1.0, -2.0, 1e-3, 7.0], device=device)
    assert_as_good_as_eager(logits, target, upstream, reduction="none")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [2, 1000, BLOCK + 9])
def test_anchor_2_no_gradient_of_a_likely_true_class_is_lost(device, dtype, V):
    odds = torch.tensor([p / (1 - p) for p in (0.9, 0.99, 0.999, 0.9999)], dtype=torch.float64)
    logits = torch.zeros(4, V, dtype=torch.float64)
    logits[:, 1] = (odds * (V - 1)).log()
    logits = (logits + 5).to(dtype).to(device)
    target = torch.ones(4, dtype=torch.int64, device=device)
    upstream = torch.ones(4, device=device)
    _, truth = torch_loss_and_gradient(logits.double(), target, upstream.double(), reduction="none")
    _, gradient = loss_and_gradient(logits, target, upstream, reduction="none")
    relative = (gradient[:, 1].double() / truth[:, 1] - 1).abs()
    assert relative.max() <= max(1e-5, torch.finfo(dtype).eps / 2)  # no more than rounding to the dtype


def test_anchor_4_no_logits_are_overwritten_and_a_second_backward_is_the_same(device):
    logits, target, upstream = make(7, 257, device, torch.bfloat16, "none")
    before = logits.clone()
    logits.requires_grad_()
    loss = cross_entropy(logits, target, reduction="none")
    loss_before = loss.detach().clone()
    (first,) = torch.autograd.grad(loss, logits, upstream, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits, upstream)
    assert torch.equal(first, second)
    assert torch.equal(logits.detach(), before)
    assert torch.equal(loss.detach(), loss_before)
    assert first.data_ptr() != logits.data_ptr() != second.data_ptr()


def test_the_loss_may_be_changed_in_place(device):
    logits, target, _ = make(3, 31, device)
    logits.requires_grad_()
    loss = cross_entropy(logits, target, reduction="none")
    loss.mul_(2)
    loss.sum().backward()
    twice = torch.full((3,), 2.0, device=device)
    _, truth = torch_loss_and_gradient(logits.detach().double(), target, twice, reduction="none")
    torch.testing.assert_close(logits.grad.double(), truth, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_anchor_5_no_upstream_gradient_is_taken_for_one(device, reduction):
    logits, target, _ = make(6, 257, device)
    expanded = torch.tensor(-0.37, device=device).expand(6 if reduction == "none" else ())
    assert_as_good_as_eager(logits, target, expanded, reduction=reduction)


def test_anchor_6_no_underflow_makes_the_loss_infinite(device):
    logits = torch.zeros(2, 31, device=device)
    logits[:, 3] = 1000
    target = torch.tensor([7, 3], device=device)
    loss, gradient = loss_and_gradient(logits, target, torch.ones(2, device=device), reduction="none")
    assert loss.tolist() == [1000, 0]
    assert gradient[0, [3, 7]].tolist() == [1, -1]
    for losses, _ in shard_by_shard(logits, target, torch.ones(2, device=device), [3, 1, 27], reduction="none"):
        assert losses.tolist() == [1000, 0]


def test_no_accuracy_is_lost_to_an_offset(device):
    logits, target, upstream = make(5, 257, device, reduction="none")
    assert_as_good_as_eager(logits + 4096, target, upstream, reduction="none")


def test_anchor_7_no_gathered_logits_are_taken_for_a_shard(device):
    logits, target, _ = make(4, 32, device)
    with pytest.raises(ValueError, match=r"classes 16 to 48 of a vocabulary of 32; .*not gathered ones"):
        function.forward(
            logits,
            target,
            options=Options(),
            vocab_start=16,
            vocab_size=32,
            gather=lambda s: s.expand(2, -1, -1),
        )


@pytest.mark.parametrize(
    ("reduction", "denominator"), [("mean", None), ("mean", 0), ("mean", 5), ("sum", None), ("none", None)]
)
def test_anchor_8_no_nan_where_all_tokens_are_ignored(device, reduction, denominator):
    logits, target, upstream = make(5, 31, device, reduction=reduction)
    target[:] = -100
    loss, gradient = loss_and_gradient(logits, target, upstream, reduction=reduction, denominator=denominator)
    if reduction == "mean" and not denominator:
        assert loss.isnan()  # as torch: a mean of nothing
    else:
        assert (loss == 0).all()
    assert (gradient == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SPLITS)
def test_anchor_9_no_vocabulary_split_changes_the_loss(device, sizes, dtype, reduction):
    logits, target, upstream = make(4, 31, device, dtype, reduction)
    target[1:] = torch.tensor([-100, 0, 30])
    results = shard_by_shard(logits, target, upstream, sizes, reduction=reduction)
    losses, gradients = zip(*results, strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert [gradient.shape[-1] for gradient in gradients] == sizes
    check_against((losses[0], torch.cat(gradients, -1)), logits, target, upstream, reduction=reduction)


@pytest.mark.parametrize("place", ["row-stride", "class-stride"])
def test_anchor_10_no_offset_past_2_to_the_31_is_cut(device, place):
    half = 2**30 + 16  # a stride within 32 bits; twice the stride, cut to 32 bits, is outside the memory: a crash
    memory = torch.empty(2 * half + 64, dtype=torch.bfloat16, device=device)  # on a CPU only touched pages take memory
    size, stride = {"row-stride": ((3, 5), (half, 1)), "class-stride": ((1, 3), (1, half))}[place]
    logits = memory.as_strided(size, stride)
    logits.copy_(torch.arange(logits.numel()).view(size) / 4 - 1)
    target = torch.full(size[:1], size[1] - 1, dtype=torch.int64, device=device)
    assert_as_good_as_eager(logits, target, torch.tensor(0.7, device=device))


def test_anchor_10_no_gradient_lands_before_2_to_the_31(interpreted):
    """Rows of the gradient further apart than fits in 31 bits, which takes more logits than a test can hold."""
    from weft.kernels.cross_entropy import kernel

    apart, V = 2**30 + 16, 5
    logits, target, _ = make(3, V, "cpu")
    memory = torch.empty(2 * apart + 64)
    out = memory.as_strided((3, V), (apart, 1))
    weights, denominator, options = (None, None), None, (-100, 1.0, None, None, None)
    kernel.statistics_and_gradient[(3,)](
        logits, target, *weights, torch.ones(1), denominator, torch.empty(3, 3), None, out,
        3, V, 3, 0, V, 1, apart, *options, RAGGED=False, BLOCK_V=8, STAGES=1,
    )  # fmt: skip
    _, expected = torch_loss_and_gradient(logits, target, torch.ones(3), reduction="none")
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "masked",
    [
        pytest.param(slice(0, BLOCK), id="first-block"),
        pytest.param(slice(BLOCK, 2 * BLOCK), id="middle-block"),
        pytest.param(slice(BLOCK, None), id="all-after-the-first-block"),
        pytest.param(slice(1, None), id="all-but-one"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_anchor_11_no_block_of_minus_infinity_makes_nan(device, dtype, masked):
    logits, target, upstream = make(3, 3 * BLOCK, device, dtype, "none")
    logits[:, masked] = -torch.inf
    kept = (logits[0] > -torch.inf).nonzero()[0]
    target[:2] = kept
    target[2] = BLOCK + 1 if logits[0, BLOCK + 1] == -torch.inf else 1  # its loss is inf
    loss, gradient = loss_and_gradient(logits, target, upstream, reduction="none")
    assert loss[2] == torch.inf
    assert gradient.isfinite().all()
    assert_as_good_as_eager(logits, target, upstream, reduction="none")


@pytest.mark.parametrize("sizes", SPLITS)
def test_anchor_11_no_shard_of_minus_infinity_makes_nan(device, sizes):
    logits, target, upstream = make(4, 31, device, torch.bfloat16, "none")
    for start in (0, 16):
        logits[:] = make(4, 31, device)[0]
        logits[:, start : start + 15] = -torch.inf
        target[:] = torch.tensor([15, 15, start, start])  # the loss of the last two is inf
        results = shard_by_shard(logits, target, upstream, sizes, reduction="none")
        losses, gradients = zip(*results, strict=True)
        assert losses[0][2:].tolist() == [torch.inf, torch.inf]
        assert all(torch.equal(loss, losses[0]) for loss in losses)
        check_against((losses[0], torch.cat(gradients, -1)), logits, target, upstream, reduction="none")


@pytest.mark.parametrize("value", [-float("inf"), float("inf"), float("nan")])
def test_a_row_without_a_softmax_is_nan_as_in_torch(device, value):
    logits, target, upstream = make(4, 31, device, reduction="none")
    logits[1] = value
    logits[3, target[3]] = abs(value)
    loss, gradient = loss_and_gradient(logits, target, upstream, reduction="none")
    assert loss.isnan().tolist() == [False, True, False, True]
    assert gradient.isnan().all(-1).tolist() == [False, True, False, True]


def test_the_lowest_finite_logits_are_no_minus_infinity(device):
    logits = torch.full((2, 5000), torch.finfo(torch.float32).min, device=device)
    logits[1, 4999] = torch.finfo(torch.float32).max / 2
    target = torch.tensor([1, 4999], device=device)
    loss, gradient = loss_and_gradient(logits, target, torch.ones(2, device=device), reduction="none")
    torch.testing.assert_close(loss.cpu(), torch.tensor([5000.0, 1.0]).log())
    expected = torch.tensor([[1 / 5000], [0]]).repeat(1, 5000)
    expected[0, 1] -= 1
    torch.testing.assert_close(gradient.cpu(), expected)
