"""Shared by the tests of cross-entropy: inputs, the oracle, and the op run shard by shard in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels.cross_entropy import function
from weft.kernels.cross_entropy.options import Options
from weft.kernels.cross_entropy.sharded.loss import as_denominator

DTYPES = [
    pytest.param(torch.bfloat16, id="bf16"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.float32, id="fp32"),
]
BLOCK = 8192  # classes a program takes at a time

ASKED: list[Any] = [
    pytest.param({"label_smoothing": 0.1}, id="smoothing"),
    pytest.param({"label_smoothing": 1.0}, id="nothing-but-smoothing"),
    pytest.param({"weight": True}, id="weight"),
    pytest.param({"weight": True, "label_smoothing": 0.2}, id="weight-smoothing"),
    pytest.param({"z_loss": 1e-2}, id="z-loss"),
    pytest.param({"softcap": 5.0}, id="softcap"),
    pytest.param({"logit_scale": -0.3}, id="scale"),
    pytest.param(
        {"weight": True, "label_smoothing": 0.2, "z_loss": 0.03, "softcap": 7.0, "logit_scale": 1.3}, id="all"
    ),
]


def given(options: dict[str, Any], V: int, device: str) -> dict[str, Any]:
    """The options; where they ask for class weights, random weights with a 0 among them."""
    if "weight" not in options:
        return options
    weight = torch.rand(V, generator=torch.Generator().manual_seed(9)) + 0.1
    weight[V // 2] = 0
    return options | {"weight": weight.to(device)}


def loss_and_gradient(
    logits: Tensor,
    target: Tensor,
    upstream: Tensor,
    *,
    weight: Tensor | None = None,
    denominator: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Loss and gradient of local tensors, without autograd."""
    asked = Options(**options)
    (loss, *_), saved = function.forward(
        logits, target, weight, as_denominator(denominator, None, logits), options=asked
    )
    dlogits, *others = function.backward(saved, (upstream,), (True, False, False, False), options=asked)
    assert others == [None, None, None]
    return loss, dlogits


def torch_loss_and_gradient(
    logits: Tensor,
    target: Tensor,
    upstream: Tensor,
    *,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    weight: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The oracle: torch's own function, on [N, V] in the dtype of `logits`; z-loss and softcap written out."""
    leaf = logits.detach().reshape(target.numel(), logits.shape[-1]).clone().requires_grad_()
    classes = target.reshape(-1).long()
    weight = None if weight is None else weight.to(logits.dtype)
    z = leaf if logit_scale == 1 else leaf * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    if not z_loss:
        loss = F.cross_entropy(z, classes, weight, reduction=reduction, **options)
    else:
        each = F.cross_entropy(z, classes, weight, reduction="none", **options)
        counts = classes != options.get("ignore_index", -100)
        z_losses = z_loss * torch.where(counts, z.logsumexp(-1), 0).square()
        shares = counts.to(z.dtype) if weight is None else weight[classes.clamp(0)] * counts
        mean = each.sum() / shares.sum() + z_losses.sum() / counts.sum()  # a z-loss has no class weight
        both = each + z_losses
        loss = {"none": both, "sum": both.sum(), "mean": mean}[reduction]
    if reduction == "none":
        loss = loss.view(target.shape)
    (gradient,) = torch.autograd.grad(loss, leaf, upstream.to(loss.dtype))
    return loss.detach(), gradient.view(logits.shape)


def ulp(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit in the last place of positive numbers, as float64: the distance to the next number of `dtype`."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(numbers.double())  # a number is in [2**(exponent - 1), 2**exponent)
    apart = torch.ldexp((numbers != 0).double() * info.eps, exponent - 1)
    return apart.clamp(min=info.smallest_normal * info.eps)


def ulps(value: Tensor, truth: Tensor) -> Tensor:
    """The distance of each value from the truth, as float64, in units in the last place of the value's dtype."""
    return (value.double() - truth).abs() / ulp(truth.abs(), value.dtype)


def max_error(value: Tensor, truth: Tensor) -> float:
    """The largest distance; infinities and NaNs count as no distance where both have the same, as inf otherwise."""
    value, truth = value.double(), truth.double()
    same = (value == truth) | (value.isnan() & truth.isnan())
    distance = (value - truth).abs().masked_fill(same, 0).nan_to_num(nan=torch.inf)
    return float(distance.max()) if distance.numel() else 0.0


def assert_as_good_as_eager(logits: Tensor, target: Tensor, upstream: Tensor, **options: Any) -> None:
    """Asserts that loss and gradient err at most twice as much as float32 eager does on the same rounded logits.

    Eager's float32 gradient is then rounded to the logits' dtype once, which is stricter than eager in that dtype.
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
    """Loss and gradient of each vocabulary shard; a gather combines the shards' statistics."""
    asked, weight = Options(**{n: v for n, v in options.items() if n != "weight"}), options.get("weight")
    shards = logits.split(sizes, dim=-1)
    starts = [sum(sizes[:shard]) for shard in range(len(sizes))]

    def of_shard(shard: int) -> dict[str, Any]:
        return {"options": asked, "vocab_start": starts[shard], "vocab_size": sum(sizes)}

    local: list[Tensor] = []
    for shard, x in enumerate(shards):
        function.forward(
            x, target, weight, **of_shard(shard), gather=lambda s: local.append(s) or (lambda: s.unsqueeze(0))
        )
    calls = Counter[int]()
    results = []
    for shard, x in enumerate(shards):

        def gather(statistics: Tensor, shard: int = shard) -> Callable[[], Tensor]:
            calls[shard] += 1
            torch.testing.assert_close(statistics, local[shard], rtol=0, atol=0, equal_nan=True)
            return lambda: torch.stack(local)

        (loss, *_), saved = function.forward(x, target, weight, **of_shard(shard), gather=gather)
        needed = (True, False, False, False)
        gradient, *_ = function.backward(saved, (upstream,), needed, **of_shard(shard), gather=gather)
        results.append((loss, gradient))
    assert calls == Counter(range(len(sizes)))  # a single collective forward, none backward
    return results
