"""Counts the memory and GEMM flop of linear cross-entropy for the head of a large language model, beside eager torch.

Forward and backward run on tensors without data. Counted are the peak bytes above inputs and gradients, and the flop
of the GEMMs divided by the flop of three GEMMs. Weft's kernels are replaced by their allocations. No time is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels import linear_cross_entropy
from weft.kernels.linear_cross_entropy import chunks, function, gradients

from benchmarks.conftest import Tell
from benchmarks.memory import Held, on_meta
from benchmarks.record import ours

HIDDEN, CLASSES = 4096, 128256
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
GOAL = 1.1e9  # bytes: a little more than the logits of 4096 tokens


def eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def summed(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Linear cross-entropy with a float32 weight gradient, as for training with microbatches."""
    weight.grad_dtype = torch.float32  # the sum of the chunks is then the gradient
    loss: Tensor = linear_cross_entropy(x, weight, target)
    return loss


def of_each_token(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = linear_cross_entropy(x, weight, target, reduction="none")
    return loss.mean()


WAYS: dict[str, Loss] = {
    "Weft": linear_cross_entropy,
    "Weft, float32 gradient": summed,
    'Weft, "none"': of_each_token,
    "eager torch": eager,
}


class Allocations:
    """Replaces the kernels: allocates their outputs and computes nothing."""

    @staticmethod
    def statistics(logits: Tensor, target: Tensor, *rest: Any) -> Tensor:
        return logits.new_empty(target.numel(), 3, dtype=torch.float32)

    @staticmethod
    def losses(statistics: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return statistics.new_empty(target.shape), statistics.new_empty(target.shape)

    @staticmethod
    def gradient(*given: Any) -> Tensor:
        out: Tensor = given[-1]
        return out

    @staticmethod
    def statistics_and_gradient(logits: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, None]:
        return Allocations.statistics(logits, target), None


def scaled(part: Tensor, factor: Tensor, dtype: torch.dtype, in_place: bool) -> Tensor:
    return part.detach() if in_place and part.dtype == dtype else part.new_empty(part.shape, dtype=dtype)


def accumulate(*given: Any) -> None:
    pass


def counted(loss: Loss, tokens: int) -> tuple[int, float]:
    """The peak bytes above inputs and gradients, and the GEMM flop divided by 6 N H V."""
    x, weight = on_meta(tokens, HIDDEN).requires_grad_(), on_meta(CLASSES, HIDDEN).requires_grad_()
    with (
        patch.object(chunks, "select_passes", lambda logits: Allocations),
        patch.object(function, "select_passes", lambda logits: Allocations),
        patch.object(function, "scale_gradient", scaled),
        patch.object(gradients, "accumulate", accumulate),
        Held() as held,
    ):
        loss(x, weight, on_meta(tokens, dtype=torch.int64)).backward()
    assert x.grad is not None and weight.grad is not None, "both operands require gradients"
    return held.peak_bytes - x.grad.nbytes - weight.grad.nbytes, held.gemm_flop / (6 * tokens * HIDDEN * CLASSES)


@pytest.mark.parametrize("tokens", [4096, 16384])
def test_linear_cross_entropy_memory_and_work(tokens: int, tell: Tell) -> None:
    found = tell.measuring(lambda: {name: counted(loss, tokens) for name, loss in WAYS.items()})
    print(f"\n{tokens} tokens, H={HIDDEN}, V={CLASSES}, bf16, forward and backward")
    print(f"{'':42}{'GB above inputs and gradients':>30}{'GEMM flop / 6NHV':>20}")
    for name, (nbytes, work) in found.items():
        print(f"{name:42}{nbytes / 1e9:30.2f}{work:20.3f}")
        flop = work * 6 * tokens * HIDDEN * CLASSES
        tell(f"linear_cross_entropy, {tokens} tokens", name, "count", peak_bytes=nbytes, flop=flop)
    assert max(nbytes for name, (nbytes, _) in found.items() if ours(name)) <= GOAL
    assert found["Weft"][1] == found["Weft, float32 gradient"][1] == 1
    assert found['Weft, "none"'][1] == 4 / 3
