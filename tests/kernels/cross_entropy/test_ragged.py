"""Rows that begin anywhere in 16-byte words: every length and place, and no byte outside the logits is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy
from weft.kernels.cross_entropy import launch, reference
from weft.kernels.cross_entropy.merged import LossShard, Upstream
from weft.kernels.cross_entropy.options import Options
from weft.kernels.launching.traffic import counted_traffic

from tests.kernels.cross_entropy.cases import BLOCK, given, make

ALL = {"weight": True, "label_smoothing": 0.2, "z_loss": 0.01, "softcap": 7.0, "logit_scale": 1.3}
LENGTHS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 24, 31, 8191, BLOCK + 1, BLOCK + 9]


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "options"])
@pytest.mark.parametrize("V", LENGTHS)
def test_the_kernels_are_torchs_path(interpreted, V, options):
    """Nine rows, beginning at different places of a 16-byte word; a gradient is written in its row alone.

    The same upstream gradient for all rows gives the same bits by one kernel as by two.
    """
    options = given(options, V, "cpu")
    weight = options.pop("weight", None)
    logits, target, upstream = make(9, V, "cpu", torch.bfloat16, "none")
    shard, arrived = LossShard(0, V, Options(reduction="none", **options)), Upstream(upstream)
    memory = torch.full((9 * V + 64,), 7.0, dtype=torch.bfloat16)
    out = memory[32 : 32 + 9 * V].view(9, V)
    assert launch._is_ragged(logits, out) == (V % 16 > 0)

    found = launch.statistics(logits, target, weight, shard)
    expected = reference.statistics(logits, target, weight, shard)
    torch.testing.assert_close(_with_mean(found, V), _with_mean(expected, V), rtol=1e-5, atol=1e-5)
    launch.gradient(logits, target, weight, found.unsqueeze(0), arrived, shard, out)
    _close(out, reference.gradient(logits, target, weight, found.unsqueeze(0), arrived, shard, torch.empty_like(out)))

    number = Upstream(torch.tensor(0.7))
    by_two_kernels = launch.gradient(logits, target, weight, found.unsqueeze(0), number, shard, out).clone()
    out.fill_(5)
    assert torch.equal(launch.statistics_and_gradient(logits, target, weight, number, shard, out)[0], found)
    assert torch.equal(out, by_two_kernels)
    assert (memory[:32] == 7).all()
    assert (memory[32 + 9 * V :] == 7).all()


def _with_mean(statistics: Tensor, V: int) -> Tensor:
    """The statistics in float64, with the sum of the logits as a single number over V, as the loss takes it.

    The sum's lower half holds the digits that rounding took from the upper half.
    """
    return torch.cat([statistics[:, :3].double(), statistics[:, 3:].double().sum(1, keepdim=True) / V], 1)


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("V", [9, 31, 4097])
def test_no_class_is_read_or_written_twice(interpreted, V):
    logits, target, _ = make(9, V, "cpu", torch.bfloat16)
    target[:] = 0
    with counted_traffic() as traffic:
        launch.statistics(logits, target, None, LossShard(0, V, Options()))
    assert traffic.loaded == 2 * logits.numel() + 9 * (8 + 2)  # and each row's target, and the target's logit
    loss = cross_entropy(logits.requires_grad_(), target, reduction="none")
    with counted_traffic() as traffic:
        loss.sum().backward()
    assert traffic.stored == 2 * logits.numel()


@pytest.mark.parametrize(
    ("change", "ragged"),
    [
        pytest.param(lambda x: x, True, id="contiguous"),
        pytest.param(lambda x: x.float(), False, id="float32"),
        pytest.param(lambda x: x[:, :-1], False, id="slice"),
        pytest.param(lambda x: x.T.contiguous().T, False, id="transposed"),
        pytest.param(lambda x: torch.cat((x.view(-1), x[0]))[1:-30].view(6, 31), False, id="off-the-word"),
    ],
)
def test_rows_by_words_are_contiguous_ones_that_begin_as_their_gradients_do(interpreted, change, ragged):
    logits, target, _ = make(6, 31, "cpu", torch.bfloat16)
    logits = change(logits)
    target.clamp_(max=29)
    assert launch._is_ragged(launch.as_batches(logits)) == ragged
    leaf = logits.detach().requires_grad_()
    (found,) = torch.autograd.grad(cross_entropy(leaf, target), leaf)
    wide = logits.double().requires_grad_()
    torch.nn.functional.cross_entropy(wide, target).backward()
    _close(found.double(), wide.grad)
