"""Cross-entropy of local tensors, on every path, against torch's in float64 on the whole tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy
from weft.kernels.cross_entropy.merged import LossShard
from weft.kernels.cross_entropy.options import Options
from weft.kernels.launching.traffic import counted_traffic

from tests.kernels.cross_entropy.cases import (
    BLOCK,
    DTYPES,
    assert_as_good_as_eager,
    loss_and_gradient,
    make,
    shard_by_shard,
    torch_loss_and_gradient,
    ulp,
    ulps,
)

SHAPES = [
    pytest.param(0, 31, id="no-tokens"),
    pytest.param(1, 1, id="one-logit"),
    pytest.param(7, 1, id="one-class"),
    pytest.param(1, 5, id="one-token"),
    pytest.param(7, 31, id="7x31"),
    pytest.param(7, 257, id="7x257"),
    pytest.param(3, 1000, id="3x1000"),
    pytest.param(2, BLOCK, id="a-block"),
    pytest.param(2, BLOCK + 1, id="a-block-and-one"),
    pytest.param(2, 65537, id="2x65537"),
]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "V"), SHAPES)
def test_matches_float64(device, N, V, dtype, reduction):
    logits, target, upstream = make(N, V, device, dtype, reduction)
    assert_as_good_as_eager(logits, target, upstream, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_float64_gradcheck(reduction):
    logits, target, _ = make(4, 6, "cpu", torch.float64)
    logits[0, 2] = -torch.inf
    target[0], target[1] = 1, -100
    logits.requires_grad_()
    denominator = 2.5 if reduction == "mean" else None
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy(x, target, reduction=reduction, denominator=denominator), logits
    )


@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64])
def test_int32_and_int64_targets(device, target_dtype):
    logits, target, upstream = make(7, 31, device)
    assert_as_good_as_eager(logits, target.to(target_dtype), upstream)


def strided(kind: str, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)

    return {
        "one-row-alone": lambda: normal(37),
        "batched": lambda: normal(3, 4, 37),
        "transposed": lambda: normal(37, 6).mT,
        "transposed-batch": lambda: normal(4, 3, 37).transpose(0, 1),
        "classes-first": lambda: normal(2, 37, 5).mT,
        "padded": lambda: normal(6, 48)[:, :37],
        "offset": lambda: normal(6, 48)[:, 5:42],
        "every-other-class": lambda: normal(6, 74)[:, ::2],
        "shifted": lambda: normal(3, 5, 37)[:, :-1],
        "shifted-from": lambda: normal(3, 5, 37)[:, 1:],
        "one-row-expanded": lambda: normal(1, 37).expand(6, 37),
        "no-two-strides": lambda: normal(2, 3, 4, 37).permute(2, 0, 1, 3)[:3, :, ::2],
    }[kind]()


STRIDED = [
    "one-row-alone",
    "batched",
    "transposed",
    "transposed-batch",
    "classes-first",
    "padded",
    "offset",
    "every-other-class",
    "shifted",
    "shifted-from",
    "one-row-expanded",
    "no-two-strides",
]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", STRIDED)
def test_any_leading_dims_and_strides(device, kind, reduction):
    logits = strided(kind, device)
    generator = torch.Generator().manual_seed(2)
    target = torch.randint(37, logits.shape[:-1], generator=generator).to(device)
    upstream = torch.randn(target.shape if reduction == "none" else (), generator=generator).to(device)
    assert_as_good_as_eager(logits, target, upstream, reduction=reduction)


@pytest.mark.parametrize("kind", [kind for kind in STRIDED if kind != "no-two-strides"])
def test_the_kernels_read_strided_logits_where_they_lie(interpreted, kind):
    from weft.kernels.cross_entropy.launch import as_batches

    logits = strided(kind, "cpu")
    assert as_batches(logits).data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 5, 30])
def test_ignored_rows(device, ignore_index, reduction):
    logits, target, upstream = make(9, 31, device, torch.bfloat16, reduction)
    target[[0, 4, 8]] = ignore_index
    assert_as_good_as_eager(logits, target, upstream, reduction=reduction, ignore_index=ignore_index)
    loss, gradient = loss_and_gradient(logits, target, upstream, reduction=reduction, ignore_index=ignore_index)
    assert (gradient[target == ignore_index] == 0).all()
    if reduction == "none":
        assert (loss[target == ignore_index] == 0).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_an_ignored_row_may_hold_anything(device, poison):
    logits, target, upstream = make(4, 31, device, reduction="none")
    logits[2] = poison
    target[2] = -100
    loss, gradient = loss_and_gradient(logits, target, upstream, reduction="none")
    assert loss[2] == 0
    assert (gradient[2] == 0).all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("denominator", [3, 12.5])
def test_denominator_divides_the_mean(device, denominator):
    logits, target, upstream = make(7, 31, device)
    target[3] = -100
    loss, gradient = loss_and_gradient(logits, target, upstream, denominator=denominator)
    total, total_gradient = torch_loss_and_gradient(logits.double(), target, upstream.double(), reduction="sum")
    torch.testing.assert_close(loss.double(), total / denominator, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), total_gradient / denominator, rtol=1e-5, atol=1e-7)


def test_an_ulp_is_the_distance_to_a_neighbour():
    numbers = torch.tensor([1.0, 1.5, 1.99, 2.0, 3e-39, 0.0])
    neighbours = torch.nextafter(numbers, torch.tensor(torch.inf))
    assert torch.equal(ulp(numbers.double(), torch.float32), neighbours.double() - numbers.double())
    assert ulp(torch.tensor([1.0, 4.0]), torch.bfloat16).tolist() == [2**-7, 2**-5]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}], ids=str)
@pytest.mark.parametrize("size", [1, 10])
def test_large_logits_lose_no_digit_of_their_dtype(device, dtype, options, size):
    """Large logits against float64: the loss is within 1e-5 and a few ulp of the lse, the gradient within an ulp.

    With smoothed labels an element of the gradient is a difference, which in float32 may be small beside its
    operands: its error may be an ulp of a quarter of the subtracted term. The logits are the same rounded ones for
    both, and the options are rounded to float32, as the kernels get them.
    """
    options = {name: torch.tensor(value).item() for name, value in options.items()}
    generator = torch.Generator().manual_seed(5)
    logits = (size * torch.randn(8, 4096, generator=generator)).to(dtype).to(device)
    target = torch.randint(4096, (8,), generator=generator).to(device)
    upstream = torch.randn(8, generator=generator).to(device)
    loss, gradient = loss_and_gradient(logits, target, upstream, reduction="none", **options)
    true_loss, truth = torch_loss_and_gradient(logits.double(), target, upstream.double(), reduction="none", **options)
    lse = logits.double().logsumexp(-1)
    assert ((loss - true_loss).abs() <= 1e-5 * true_loss.abs() + 4 * torch.finfo(torch.float32).eps * lse).all()
    if dtype != torch.float32:
        assert ulps(gradient, truth).max() <= 1
        return
    subtracted = upstream.double().abs()[:, None] * options.get("label_smoothing", 0) / 4096
    allowed = ulp(torch.maximum(truth.abs(), subtracted / 4), dtype)
    assert ((gradient.double() - truth).abs() <= allowed).all()


@pytest.mark.few(2)
@pytest.mark.parametrize("sizes", [[4096], [1000, 3096]], ids=str)
@pytest.mark.parametrize("far", [-1000.0, -70.0, 70.0, 1000.0])
def test_float32_loses_no_digit_far_from_the_true_class(device, far, sizes):
    generator = torch.Generator().manual_seed(6)
    target = torch.tensor([5, 999, 1000, 4095]).to(device)
    logits = (3 * torch.randn(4, 4096, generator=generator)).to(device) - far
    logits[torch.arange(4, device=device), target] += far
    upstream = torch.randn(4, generator=generator).to(device)
    loss, truth = torch_loss_and_gradient(logits.double(), target, upstream.double(), reduction="none")
    true_class = torch.nn.functional.one_hot(target, 4096).bool()
    truth[true_class] = -truth.masked_fill(true_class, 0).sum(-1)  # float64 has no digits of 1 - p left
    results = shard_by_shard(logits, target, upstream, sizes, reduction="none")
    torch.testing.assert_close(results[0][0].double(), loss, rtol=1e-5, atol=1e-15)
    assert ulps(torch.cat([gradient for _, gradient in results], -1), truth).max() <= 1


def test_float32_loses_no_digit_where_all_logits_are_large(device):
    for all_of_them in (-5000.0, -690.0, 690.0, 700.0, 5000.0):
        generator = torch.Generator().manual_seed(7)
        logits = (3 * torch.randn(4, 257, generator=generator)).to(device) + all_of_them
        target = torch.randint(257, (4,), generator=generator).to(device)
        # the upstream gradient of a loss that is scaled down
        upstream = 1e-18 * torch.randn(4, generator=generator).to(device)
        near = logits.double() - all_of_them  # exact, and the loss is the same
        loss, truth = torch_loss_and_gradient(near, target, upstream.double(), reduction="none")
        found, gradient = loss_and_gradient(logits, target, upstream, reduction="none")
        torch.testing.assert_close(found.double(), loss, rtol=1e-5, atol=1e-15)
        assert ulps(gradient, truth).max() <= 1, all_of_them


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("logit", "gradient"), [(2.0492654, 1.0), (2.7426605, -0.7), (4.129451, 0.3), (4.822846, 2.0)], ids=str
)
def test_float32_loses_no_digit_of_a_long_sum(device, logit, gradient):
    """With equal logits all lanes round alike: summing 64 such exponentials in float32 alone would lose 3 bits."""
    logits = torch.full((1, 1 << 17), logit, device=device)
    logits[:, 0] = 0
    target = torch.zeros(1, dtype=torch.long, device=device)
    upstream = torch.tensor([gradient], device=device)
    _, truth = torch_loss_and_gradient(logits.double(), target, upstream.double(), reduction="none")
    _, gradient = loss_and_gradient(logits, target, upstream, reduction="none")
    assert ulps(gradient, truth).max() <= 1


@pytest.mark.parametrize(("far", "readings"), [(0.0, 1), (50.0, 1), (-50.0, 1), (100.0, 2), (-100.0, 2)])
def test_float32_logits_are_read_once_where_the_true_class_is_near_the_largest(interpreted, far, readings):
    from weft.kernels.cross_entropy import launch

    logits = torch.zeros(3, 5000)
    logits[:, 7] = far
    with counted_traffic() as seen:
        launch.statistics(logits, torch.full((3,), 7), None, LossShard(0, 5000, Options()))
    assert seen.loaded == 3 * (8 + 4 + readings * 4 * 5000)


@pytest.mark.parametrize("shift", [-2e4, -690.0, -605.0, -80.0, 0.0, 75.0, 85.0, 590.0, 2e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_does_not_lose_digits_wherever_the_logits_lie(device, dtype, shift):
    """Rows with other offsets are in the same batch: some need no maximum subtracted before exp."""
    logits, target, upstream = make(6, 129, device, dtype, reduction="none")
    logits[::2] = (logits[::2].double() + shift).to(dtype)
    logits[0, target[0]] += 30  # a likely class: the remaining classes have a small sum
    loss, gradient = loss_and_gradient(logits, target, upstream, reduction="none")
    true_loss, truth = torch_loss_and_gradient(logits.double(), target, upstream.double(), reduction="none")
    assert float(ulps(gradient, truth).max()) <= 1
    torch.testing.assert_close(loss.double(), true_loss, rtol=1e-5, atol=1e-12)
