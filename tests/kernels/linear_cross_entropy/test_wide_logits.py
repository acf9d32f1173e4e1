"""Logits of 16-bit factors are float32: gradients err by rounding the logits' gradient, and by rounding the result."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels import linear_cross_entropy
from weft.kernels.linear_cross_entropy import chunks

from tests.kernels.cross_entropy.cases import max_error, torch_loss_and_gradient
from tests.kernels.linear_cross_entropy.cases import Given, make, run, shard_by_shard

N, V, H = 48, 130, 64
NARROW = [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16")]


def large(device: str, dtype: torch.dtype, reduction: str, N: int = N) -> Given:
    """Logits of 8 times randn, which 16 bits would round by as much as 0.06."""
    case = make((N,), V, device, dtype, reduction, H=H, bias=True)
    # Half of the targets are likely classes.
    case.target[1::2] = (case.input[1::2] @ case.linear_weight.mT + case.linear_bias).argmax(-1)
    return case


def truth_and_rounded(case: Given, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and gradients in float64; and the same with the logits' gradient and the results rounded to 16 bits."""
    dtype, leaves = case.input.dtype, [leaf.detach().double().requires_grad_() for leaf in case.leaves()]
    logits = F.linear(*leaves)
    loss, dlogits = torch_loss_and_gradient(logits.detach(), case.target, case.upstream.double(), **options)
    truth, rounded = (
        [loss, *torch.autograd.grad(logits, leaves, given, retain_graph=True)]
        for given in (dlogits, dlogits.to(dtype).double())
    )
    return truth, [loss.float(), *(each.to(dtype) for each in rounded[1:])]


def check_error(found: list[Tensor], case: Given, **options: Any) -> None:
    for ours, true, rounded in zip(found, *truth_and_rounded(case, **options), strict=True):
        largest = float(true.abs().max())
        least = torch.finfo(ours.dtype).eps / 2 * largest  # a rounding of the result
        assert max_error(ours, true) <= 2 * max(max_error(rounded, true), least) + 1e-6 * largest


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_tokens", [None, 7])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}, {"softcap": 20.0}], ids=str)
def test_the_error_is_that_of_rounding_the_gradients(device, dtype, reduction, chunk_tokens, options):
    case, options = large(device, dtype, reduction), options | {"reduction": reduction}
    loss, gradients = run(case, chunk_tokens=chunk_tokens, **options)
    check_error([loss, *gradients], case, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_parts_of_a_chunk_are_the_whole(device, dtype, reduction):
    tokens = 14  # three parts of 5, and two chunks of 7
    case = large(device, dtype, reduction, tokens)
    whole = run(case, reduction=reduction)
    held_bytes = dict.fromkeys(("HELD_BYTES", "HELD_BYTES_ON_CPU"), 4 * 5 * V * chunks.PARTS_SHARE)
    with patch.multiple(chunks, TILE=5, **held_bytes):
        assert chunks.part_tokens(V, 1, case.input) == 5
        parts = run(case, reduction=reduction, chunk_tokens=tokens)
        check_error([parts[0], *parts[1]], case, reduction=reduction)
        shards = shard_by_shard(case, [60, 0, 70], chunk_tokens=7, reduction=reduction)
    torch.testing.assert_close(parts, whole, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    torch.testing.assert_close(shards[0], whole[0])
    check_error([shards[0], *shards[1]], case, reduction=reduction)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", NARROW)
def test_the_error_is_no_larger_than_that_of_torchs_chunks(device, dtype):
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("torch has no linear_cross_entropy before 2.12")
    case = large(device, dtype, "mean")
    case.target.clamp_(min=0)
    leaves = case.leaves()[:2]
    case = case._replace(linear_bias=None)

    def errors(loss: Tensor) -> list[float]:
        found = torch.autograd.grad(loss, leaves)
        return [max_error(ours, true) for ours, true in zip(found, truth, strict=True)]

    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = torch.autograd.grad(F.cross_entropy(F.linear(*wide), case.target), wide)
    theirs = errors(F.linear_cross_entropy(*leaves, case.target, options=torch.nn.LinearCrossEntropyOptions()))
    ours = errors(linear_cross_entropy(*leaves, case.target))
    assert all(mine <= 2 * other for mine, other in zip(ours, theirs, strict=True))


def test_a_product_in_blocks_of_classes_is_the_whole():
    case = large("cpu", torch.bfloat16, "mean")
    product = chunks.LogitFactors(
        case.input.detach(), case.linear_weight.detach(), case.linear_bias.detach(), case.target
    )
    expected = F.linear(*(leaf.detach().double() for leaf in case.leaves()))
    for nbytes in (1, 4 * H * 7, 1 << 21):
        with patch.object(chunks, "CAST_BYTES", nbytes):
            logits = product.logits(slice(3, 20), product.logits_buffer(20))
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), expected[3:20], rtol=1e-5, atol=1e-5)
