"""The hard cases of one process, on shards of the vocabulary and in chunks of the tokens."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cross_entropy.cases import given
from tests.kernels.linear_cross_entropy.cases import check, make, shard_by_shard

V, SIZES = 31, [16, 0, 15]
CHUNKS = [pytest.param(None, id="one-chunk"), pytest.param(4, id="4-tokens")]


@pytest.mark.parametrize(("reduction", "sizes"), [("none", [10, 10, 10, 1]), ("mean", [0, 31])], ids=str)
def test_paddlenlp_9412_no_split_of_an_odd_vocabulary_changes_the_loss(device, sizes, reduction):
    case = make((2, 3), V, device, torch.bfloat16, reduction, bias=True)
    check(case, *shard_by_shard(case, sizes, chunk_tokens=4, reduction=reduction), reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_tokens(device, reduction):
    case = make((0,), V, device, reduction=reduction, bias=True)
    loss, gradients = shard_by_shard(case, SIZES, reduction=reduction)
    assert loss.isnan() if reduction == "mean" else loss.sum() == 0
    assert [each.shape for each in gradients] == [leaf.shape for leaf in case.leaves()]
    assert all((each == 0).all() for each in gradients)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_tokens_ignored(device, reduction, chunk_tokens):
    case = make((5,), V, device, reduction=reduction, bias=True)
    case.target[:] = -100
    loss, gradients = shard_by_shard(case, SIZES, chunk_tokens=chunk_tokens, reduction=reduction)
    assert loss.isnan() if reduction == "mean" else (loss == 0).all()
    assert all((each == 0).all() for each in gradients)


@pytest.mark.parametrize("likely", [3, 30], ids=["first-shard", "last-shard"])
@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"weight": True, "label_smoothing": 0.1}], ids=str)
def test_no_gap_of_200_is_lost_to_smoothing(device, options, likely):
    case = make((4,), V, device, reduction="none", bias=True)
    with torch.no_grad():
        case.linear_bias[likely] += 200
    case.target[:2] = torch.tensor([likely, 5])
    options = given(options, V, device) | {"reduction": "none"}
    check(case, *shard_by_shard(case, SIZES, chunk_tokens=3, **options), **options)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("masked", [slice(0, 16), slice(16, 31)], ids=["first", "last"])
def test_a_whole_shard_of_minus_infinity(device, masked, chunk_tokens):
    """The last rank has such a shard when the vocabulary is padded."""
    case = make((5,), V, device, reduction="none", bias=True)
    with torch.no_grad():
        case.linear_bias[masked] = -torch.inf
    case.target[:] = int((case.linear_bias.detach() > -torch.inf).nonzero()[0])
    loss, gradients = shard_by_shard(case, SIZES, chunk_tokens=chunk_tokens, reduction="none")
    check(case, loss, gradients, reduction="none")
    assert all(each.isfinite().all() for each in (loss, *gradients))
    assert (gradients[2][masked] == 0).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_transposed_and_sliced_factors(device, reduction):
    case = make((2, 3), V, device, reduction=reduction, bias=True)
    x = case.input.detach().transpose(0, 1).contiguous().transpose(0, 1)
    weight = torch.cat([case.linear_weight.detach()] * 2, 1).T.contiguous().T[:, :16]
    assert not weight.split(SIZES)[2].is_contiguous()
    other = case._replace(input=x, linear_weight=weight)
    expected = shard_by_shard(case, SIZES, chunk_tokens=5, reduction=reduction)
    torch.testing.assert_close(shard_by_shard(other, SIZES, chunk_tokens=5, reduction=reduction), expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_upstream_gradient_of_stride_0(device, reduction):
    case = make((3,), V, device, reduction=reduction)
    case = case._replace(upstream=torch.tensor(-0.37, device=device).expand(3 if reduction == "none" else ()))
    check(case, *shard_by_shard(case, SIZES, chunk_tokens=2, reduction=reduction), reduction=reduction)


@pytest.mark.parametrize(("reduction", "ignore_index"), [("mean", 15), ("none", 16)])
def test_a_class_of_another_shard_is_ignored(device, reduction, ignore_index):
    case = make((5,), V, device, reduction=reduction)
    case.target[[0, 2, 4]] = ignore_index
    options = {"reduction": reduction, "ignore_index": ignore_index}
    loss, gradients = shard_by_shard(case, SIZES, chunk_tokens=4, **options)
    check(case, loss, gradients, **options)
    assert (gradients[0][case.target == ignore_index] == 0).all()
