"""Cross-entropy of local tensors, on every path, against torch's in float64 on the whole tensor.

What broke other libraries is tested under its name, `test_no_…`.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels.cross_entropy import function, reference
from weft.kernels.op import Op
from weft.kernels.sharded import apply

DTYPES = [
    pytest.param(torch.bfloat16, id="bf16"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.float32, id="fp32"),
]
OPTIONS: dict[str, Any] = {"ignore_index": -100, "reduction": "mean", "denominator": None}
OP = Op("cross_entropy", function.forward, function.backward, lambda layouts, shapes, options: None)
BLOCK = 4096  # classes a program takes at a time
IGNORE_NUMPY = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # inf - inf in the interpreter


def loss_and_gradient(logits: Tensor, target: Tensor, upstream: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    options = OPTIONS | options
    loss, saved = function.forward(logits, target, **options)
    dlogits, none = function.backward(saved, upstream, (True, False), **options)
    assert none is None
    return loss, dlogits


def torch_loss_and_gradient(
    logits: Tensor, target: Tensor, upstream: Tensor, *, reduction: str = "mean", ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """The oracle: torch's own function, on [N, V] in the dtype of `logits`."""
    V = logits.shape[-1]
    leaf = logits.detach().reshape(target.numel(), V).clone().requires_grad_()
    loss = F.cross_entropy(leaf, target.reshape(-1).long(), reduction=reduction, ignore_index=ignore_index)
    if reduction == "none":
        loss = loss.view(target.shape)
    (gradient,) = torch.autograd.grad(loss, leaf, upstream.to(loss.dtype))
    return loss.detach(), gradient.view(logits.shape)


def max_error(value: Tensor, truth: Tensor) -> float:
    """The largest distance; infinities and NaNs count as no distance where both have the same, as inf otherwise."""
    value, truth = value.double(), truth.double()
    same = (value == truth) | (value.isnan() & truth.isnan())
    distance = (value - truth).abs().masked_fill(same, 0).nan_to_num(nan=torch.inf)
    return float(distance.max()) if distance.numel() else 0.0


def assert_as_good_as_eager(logits: Tensor, target: Tensor, upstream: Tensor, **options: Any) -> None:
    """Loss and gradient within twice what float32 eager errs on the same rounded logits.

    Its gradient is rounded to the logits' dtype once: stricter than eager in that dtype.
    """
    value = loss_and_gradient(logits, target, upstream, **options)
    check_against(value, logits, target, upstream, **options)


def check_against(
    value: tuple[Tensor, Tensor], logits: Tensor, target: Tensor, upstream: Tensor, **options: Any
) -> None:
    truth = torch_loss_and_gradient(logits.double(), target, upstream, **options)
    eager_loss, eager_gradient = torch_loss_and_gradient(logits.float(), target, upstream, **options)
    for name, ours, true, eager in zip(
        ("loss", "gradient"), value, truth, (eager_loss, eager_gradient.to(logits.dtype)), strict=True
    ):
        assert ours.shape == true.shape
        largest = float(true.nan_to_num(posinf=0, neginf=0).abs().max()) if true.numel() else 0
        allowed = 2 * max_error(eager, true) + 4 * torch.finfo(torch.float32).eps * largest
        assert max_error(ours, true) <= allowed, name
    assert value[0].dtype == torch.float32
    assert value[1].dtype == logits.dtype


def make(
    N: int, V: int, device: str, dtype: torch.dtype = torch.float32, reduction: str = "mean", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, V], targets [N] and a random upstream gradient of the loss's shape."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(N, V, generator=generator)).to(dtype)
    target = torch.randint(V, (N,), generator=generator)
    upstream = torch.randn((N,) if reduction == "none" else (), generator=generator)
    return logits.to(device), target.to(device), upstream.to(device)


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
        lambda x: apply(OP, x, target, ignore_index=-100, reduction=reduction, denominator=denominator), logits
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


# What broke the others


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_row_takes_the_upstream_gradient_of_another(device, dtype):
    logits, target, _ = make(5, 257, device, dtype)
    upstream = torch.tensor([0.0, 1.0, -2.0, 1e-3, 7.0], device=device)
    assert_as_good_as_eager(logits, target, upstream, reduction="none")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [2, 1000, BLOCK + 9])
def test_no_gradient_of_a_likely_true_class_is_lost(device, dtype, V):
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


def test_no_logits_are_overwritten_and_a_second_backward_is_the_same(device):
    logits, target, upstream = make(7, 257, device, torch.bfloat16, "none")
    before = logits.clone()
    logits.requires_grad_()
    loss = apply(OP, logits, target, ignore_index=-100, reduction="none", denominator=None)
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
    loss = apply(OP, logits, target, ignore_index=-100, reduction="none", denominator=None)
    loss.mul_(2)
    loss.sum().backward()
    twice = torch.full((3,), 2.0, device=device)
    _, truth = torch_loss_and_gradient(logits.detach().double(), target, twice, reduction="none")
    torch.testing.assert_close(logits.grad.double(), truth, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_upstream_gradient_is_taken_for_one(device, reduction):
    logits, target, _ = make(6, 257, device)
    expanded = torch.tensor(-0.37, device=device).expand(6 if reduction == "none" else ())
    assert_as_good_as_eager(logits, target, expanded, reduction=reduction)


def test_no_underflow_makes_the_loss_infinite(device):
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


def test_no_gathered_logits_are_taken_for_a_shard(device):
    logits, target, _ = make(4, 32, device)
    with pytest.raises(ValueError, match=r"classes 16 to 48 of a vocabulary of 32; .*not gathered ones"):
        function.forward(logits, target, **OPTIONS, vocab_start=16, vocab_size=32, gather=lambda s: s.expand(2, -1, -1))


@pytest.mark.parametrize(
    ("reduction", "denominator"), [("mean", None), ("mean", 0), ("mean", 5), ("sum", None), ("none", None)]
)
def test_no_nan_where_all_tokens_are_ignored(device, reduction, denominator):
    logits, target, upstream = make(5, 31, device, reduction=reduction)
    target[:] = -100
    loss, gradient = loss_and_gradient(logits, target, upstream, reduction=reduction, denominator=denominator)
    if reduction == "mean" and not denominator:
        assert loss.isnan()  # as torch: a mean of nothing
    else:
        assert (loss == 0).all()
    assert (gradient == 0).all()


SPLITS = [
    pytest.param([31], id="one-shard"),
    pytest.param([16, 15], id="uneven"),
    pytest.param([8, 8, 8, 7], id="uneven-4"),
    pytest.param([10, 10, 10, 1], id="almost-empty"),
    pytest.param([16, 15, 0, 0], id="empty-last"),
    pytest.param([0, 31], id="empty-first"),
    pytest.param([1, 1, 1, 28], id="single-classes"),
]


def shard_by_shard(
    logits: Tensor, target: Tensor, upstream: Tensor, sizes: list[int], **options: Any
) -> list[tuple[Tensor, Tensor]]:
    """Loss and gradient of each vocabulary shard, the shards' statistics meeting in one gather each."""
    options = OPTIONS | options
    shards = logits.split(sizes, dim=-1)
    starts = [sum(sizes[:shard]) for shard in range(len(sizes))]

    def of_shard(shard: int) -> dict[str, Any]:
        return options | {"vocab_start": starts[shard], "vocab_size": sum(sizes)}

    local: list[Tensor] = []
    for shard, x in enumerate(shards):
        function.forward(x, target, **of_shard(shard), gather=lambda s: local.append(s) or s.unsqueeze(0))
    calls = Counter[int]()
    results = []
    for shard, x in enumerate(shards):

        def gather(statistics: Tensor, shard: int = shard) -> Tensor:
            calls[shard] += 1
            torch.testing.assert_close(statistics, local[shard], rtol=0, atol=0, equal_nan=True)
            return torch.stack(local)

        loss, saved = function.forward(x, target, **of_shard(shard), gather=gather)
        gradient, _ = function.backward(saved, upstream, (True, False), **of_shard(shard), gather=gather)
        results.append((loss, gradient))
    assert calls == Counter(range(len(sizes)))  # one collective forward, none backward
    return results


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SPLITS)
def test_no_vocabulary_split_changes_the_loss(device, sizes, dtype, reduction):
    logits, target, upstream = make(6, 31, device, dtype, reduction)
    target[1] = -100
    target[2], target[3] = 0, 30
    results = shard_by_shard(logits, target, upstream, sizes, reduction=reduction)
    losses, gradients = zip(*results, strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert [gradient.shape[-1] for gradient in gradients] == sizes
    check_against((losses[0], torch.cat(gradients, -1)), logits, target, upstream, reduction=reduction)


@pytest.mark.parametrize("place", ["row-stride", "class-stride"])
def test_no_offset_past_2_to_the_31_is_cut(device, place):
    half = 2**30 + 16  # a stride that fits in 32 bits; twice it does not, and cut to them lies outside: a crash
    memory = torch.empty(2 * half + 64, dtype=torch.bfloat16, device=device)  # on a CPU only touched pages take memory
    size, stride = {"row-stride": ((3, 5), (half, 1)), "class-stride": ((1, 3), (1, half))}[place]
    logits = memory.as_strided(size, stride)
    logits.copy_(torch.arange(logits.numel()).view(size) / 4 - 1)
    target = torch.full(size[:1], size[1] - 1, dtype=torch.int64, device=device)
    assert_as_good_as_eager(logits, target, torch.tensor(0.7, device=device))


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
def test_no_block_of_minus_infinity_makes_nan(device, dtype, masked):
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
def test_no_shard_of_minus_infinity_makes_nan(device, sizes):
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


@IGNORE_NUMPY
@pytest.mark.parametrize("value", [-float("inf"), float("inf"), float("nan")])
def test_a_row_without_a_softmax_is_nan_as_in_torch(device, value):
    logits, target, upstream = make(4, 31, device, reduction="none")
    logits[1] = value
    logits[3, target[3]] = abs(value)
    loss, gradient = loss_and_gradient(logits, target, upstream, reduction="none")
    assert loss.isnan().tolist() == [False, True, False, True]
    assert gradient.isnan().all(-1).tolist() == [False, True, False, True]


@IGNORE_NUMPY
def test_the_lowest_finite_logits_are_no_minus_infinity(device):
    logits = torch.full((2, 5000), torch.finfo(torch.float32).min, device=device)
    logits[1, 4999] = torch.finfo(torch.float32).max / 2
    target = torch.tensor([1, 4999], device=device)
    loss, _ = loss_and_gradient(logits, target, torch.ones(2, device=device), reduction="none")
    torch.testing.assert_close(loss.cpu(), torch.tensor([5000.0, 1.0]).log())


# Contracts


@pytest.mark.parametrize("sizes", [[31], [16, 15]], ids=["whole", "sharded"])
@pytest.mark.parametrize("wrong", [-1, 31, 2**40])
def test_a_target_that_is_no_class(device, wrong, sizes):
    logits, target, upstream = make(6, 31, device, reduction="none")
    logits, target, upstream = logits.view(2, 3, 31), target.view(2, 3), upstream.view(2, 3)
    target[1, 2] = wrong
    if device == "cpu":
        with pytest.raises(ValueError, match=rf"target\[1, 2\] is {wrong}, which is no class of 31 \(0 to 30\)"):
            shard_by_shard(logits, target, upstream, sizes, reduction="none")
        return
    for loss, gradient in shard_by_shard(logits, target, upstream, sizes, reduction="none"):
        assert loss.isnan().flatten().tolist() == [False] * 5 + [True]
        assert gradient.isnan().any(-1).flatten().tolist() == [False] * 5 + [True]


def test_the_passes_mark_a_target_that_is_no_class_with_nan(device):
    passes = function._passes(torch.empty(0, device=device))
    logits, target, _ = make(4, 31, device)
    target[:3] = torch.tensor([-1, 31, -100])
    found = passes.statistics(logits, target, vocab_start=0, vocab_size=31, ignore_index=-100)
    assert found[:, 1].isnan().tolist() == [True, True, False, False]
    assert found[2].tolist() == [-torch.inf, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"target": torch.zeros(4)}, "target has dtype torch.float32", id="float-target"),
        pytest.param({"target": torch.zeros(3).long()}, r"target of shape \(3,\) .*\(4,\)", id="short-target"),
        pytest.param({"target": torch.zeros(4, 5).long()}, r"target of shape \(4, 5\)", id="one-hot-target"),
        pytest.param({"logits": torch.zeros(4, 5).long()}, "dtype torch.int64", id="int-logits"),
        pytest.param({"logits": torch.tensor(1.0)}, r"logits of shape \(\)", id="scalar-logits"),
        pytest.param({"logits": torch.zeros(4, 5, device="meta")}, "target is on cpu, logits on meta", id="devices"),
        pytest.param({"reduction": "avg"}, "'avg'; choose one of 'mean', 'sum', 'none'", id="reduction"),
        pytest.param({"ignore_index": None}, "ignore_index is None", id="ignore-index"),
        pytest.param({"denominator": -2.0}, "denominator is -2.0", id="negative-denominator"),
        pytest.param({"denominator": float("nan")}, "denominator is nan", id="nan-denominator"),
        pytest.param({"denominator": 4, "reduction": "sum"}, "only 'mean' divides", id="denominator-of-a-sum"),
        pytest.param({"vocab_start": -1}, "vocab_start is -1", id="negative-start"),
        pytest.param({"vocab_start": 1, "vocab_size": 5}, "classes 1 to 6 of a vocabulary of 5", id="past-the-end"),
    ],
)
def test_what_cannot_be_taken_is_said_before_anything_runs(change, message):
    arguments = {"logits": torch.zeros(4, 5), "target": torch.zeros(4).long()} | OPTIONS | change
    gathers: list[Tensor] = []
    with pytest.raises(ValueError, match=message):
        function.forward(arguments.pop("logits"), arguments.pop("target"), **arguments, gather=gathers.append)
    assert gathers == []


def test_a_gather_of_the_wrong_shape(device):
    logits, target, _ = make(4, 5, device)
    with pytest.raises(ValueError, match=r"gather returned a tensor of shape \(8, 3\) for .* \(4, 3\)"):
        function.forward(logits, target, **OPTIONS, gather=lambda s: s.repeat(2, 1))


def test_no_gradient_is_made_where_none_is_needed(device):
    logits, target, upstream = make(4, 5, device)
    _, saved = function.forward(logits, target, **OPTIONS)
    assert function.backward(saved, upstream, (False, False), **OPTIONS) == (None, None)


def test_only_the_logits_themselves_are_saved(device):
    logits, target, _ = make(6, 257, device, torch.bfloat16)
    _, saved = function.forward(logits, target, **OPTIONS)
    assert saved[0] is logits
    assert saved[1] is target
    assert all(tensor.shape == (6,) and tensor.is_contiguous() for tensor in saved[2:])


def test_merge_is_exact_about_minus_infinity():
    shard = torch.tensor([[2.0, 3.0, 1.5]])
    empty = torch.tensor([[-torch.inf, 0.0, 0.0]])
    alone = reference.merge(shard.unsqueeze(0))
    for statistics in ((shard, empty), (empty, shard), (empty, shard, empty)):
        assert all(map(torch.equal, reference.merge(torch.stack(statistics)), alone))
    only_the_target = torch.tensor([[-torch.inf, 0.0, 1.5]])
    assert [float(x) for x in reference.merge(only_the_target.unsqueeze(0))] == [1.5, 0, -torch.inf]


@pytest.mark.parametrize("chunk", [1, 31, 100])
def test_the_reference_is_the_same_in_any_chunks(monkeypatch, chunk):
    logits, target, upstream = make(7, 31, "cpu", torch.bfloat16)
    whole = loss_and_gradient(logits, target, upstream)
    monkeypatch.setattr(reference, "CHUNK", chunk)
    assert all(map(torch.equal, loss_and_gradient(logits, target, upstream), whole))


def test_six_bytes_a_bf16_logit(interpreted, monkeypatch):
    """2 read forward; 2 read and 2 written backward; nothing read of an ignored row but its target and its scale."""
    from triton.runtime.interpreter import InterpreterBuilder

    moved = Counter[str]()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        moved["loaded"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return load(self, ptrs, mask, *rest)

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        moved["stored"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return store(self, ptrs, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted_store)
    N, V, ignored = 5, 5000, 2
    logits, target, upstream = make(N, V, "cpu", torch.bfloat16)
    target[:ignored] = -100

    _, saved = function.forward(logits, target, **OPTIONS)
    assert moved == {"loaded": (N - ignored) * (V * 2 + 2) + N * 8, "stored": N * 12}
    moved.clear()
    function.backward(saved, upstream, (True, False), **OPTIONS)
    assert moved == {"loaded": (N - ignored) * (V * 2 + 8 + 3 * 4) + N * 4, "stored": N * V * 2}


def test_a_cpu_run_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from weft.kernels.cross_entropy import function\n"
        "options = dict(ignore_index=-100, reduction='mean', denominator=None)\n"
        "loss, saved = function.forward(torch.zeros(2, 8), torch.tensor([1, 2]), **options)\n"
        "function.backward(saved, torch.ones(()), (True, False), **options)\n"
        "print(round(float(loss), 4))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "2.0794\n"
