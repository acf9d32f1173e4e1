"""Shared by the tests of linear cross-entropy: inputs, the oracle, and the error that gradients may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels import linear_cross_entropy
from weft.kernels.cross_entropy.function import StartGather
from weft.kernels.cross_entropy.options import Options
from weft.kernels.dispatch.op import Tensors
from weft.kernels.linear_cross_entropy import function

from tests.kernels.cross_entropy.cases import max_error, torch_loss_and_gradient

CHUNKS = [pytest.param(None, id="one-chunk"), pytest.param(4, id="4-tokens"), pytest.param(1, id="1-token")]


class Given(NamedTuple):
    """input [..., H], linear_weight [V, H], linear_bias [V] or None, target [...], and the upstream gradient."""

    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    target: Tensor
    upstream: Tensor

    def leaves(self) -> list[Tensor]:
        return [x for x in (self.input, self.linear_weight, self.linear_bias) if x is not None]


def make(
    tokens: tuple[int, ...],
    V: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    reduction: str = "mean",
    H: int = 16,
    bias: bool = False,
) -> Given:
    """Leaves that require gradients, with logits of about randn; the third token, if present, is ignored."""
    generator = torch.Generator().manual_seed(V)
    x = torch.randn(*tokens, H, generator=generator)
    weight = torch.randn(V, H, generator=generator)
    b = torch.randn(V, generator=generator)
    target = torch.randint(V, tokens, generator=generator)
    target.view(-1)[2:3] = -100
    upstream = torch.randn(tokens if reduction == "none" else (), generator=generator).to(device)
    leaves = [each.to(dtype).to(device).requires_grad_() for each in (x, weight, b)]
    return Given(leaves[0], leaves[1], leaves[2] if bias else None, target.to(device), upstream)


def oracle(case: Given, dtype: torch.dtype, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients by torch's linear in `dtype` and cross-entropy, which is no narrower than float32."""
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in case.leaves()]
    logits = F.linear(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None)
    wide = logits.detach().to(torch.promote_types(dtype, torch.float32))
    loss, dlogits = torch_loss_and_gradient(wide, case.target, case.upstream, **options)
    return loss, list(torch.autograd.grad(logits, leaves, dlogits.to(dtype)))


def run(case: Given, **options: Any) -> tuple[Tensor, list[Tensor]]:
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target, linear_bias=case.linear_bias, **options)
    return loss.detach(), list(torch.autograd.grad(loss, case.leaves(), case.upstream.to(loss.dtype)))


def check(case: Given, loss: Tensor, gradients: list[Tensor], **options: Any) -> None:
    """Asserts that loss and gradients err at most twice as much as eager torch in the same dtype."""
    true_loss, true_gradients = oracle(case, torch.float64, **options)
    eager_loss, eager_gradients = oracle(case, case.input.dtype, **options)
    for ours, true, eager in zip(
        (loss, *gradients), (true_loss, *true_gradients), (eager_loss, *eager_gradients), strict=True
    ):
        assert ours.shape == true.shape
        largest = float(true.abs().max()) if true.numel() else 0.0
        # Eager may err little by luck, so its error counts as at least one rounding of the result.
        eager_error = max(max_error(eager, true), torch.finfo(ours.dtype).eps / 2 * largest)
        assert max_error(ours, true) <= 2 * eager_error + 4 * torch.finfo(torch.float32).eps * largest


def shard_by_shard(
    case: Given, sizes: list[int], *, chunk_tokens: int | None = None, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """Loss and whole gradients of vocabulary shards in one process, which combine statistics once a chunk.

    Asserts that all shards have bitwise the same loss, and that only forward gathers.
    """
    weight = options.pop("weight", None)
    x, *factors = (leaf.detach() for leaf in case.leaves())
    parts = list(zip(*(factor.split(sizes) for factor in factors), strict=True))
    starts = [sum(sizes[:shard]) for shard in range(len(sizes))]

    def forward(shard: int, wanted: bool, gather: StartGather) -> tuple[Tensor, Callable[[], Tensors]]:
        linear_weight, bias = (*parts[shard], None)[:2]
        given = {
            "options": Options(**options), "wanted": (x.dtype if wanted else None,) * 3, "chunk_tokens": chunk_tokens,
            "vocab_start": starts[shard], "vocab_size": sum(sizes), "shards": len(sizes), "gather": gather,
        }  # fmt: skip
        (loss, *_), saved = function.forward(x, linear_weight, case.target, bias, weight, **given)
        needed = (True, True, False, bias is not None, False, False)
        return loss, lambda: function.backward(saved, (case.upstream.to(loss.dtype),), needed, **given)

    def keeping(kept: list[Tensor]) -> StartGather:
        def gather(found: Tensor) -> Callable[[], Tensor]:
            kept.append(found)
            return partial(found.unsqueeze, 0)

        return gather

    def meeting(chunks: Iterator[tuple[Tensor, ...]]) -> StartGather:
        return lambda found: partial(torch.stack, next(chunks))

    local: list[list[Tensor]] = [[] for _ in sizes]  # of each shard the statistics of each chunk
    for shard, kept in enumerate(local):
        forward(shard, False, keeping(kept))
    losses, gradients = [], []
    for shard in range(len(sizes)):
        chunks = zip(*local, strict=True)
        loss, backward = forward(shard, True, meeting(chunks))
        assert next(chunks, None) is None  # as many gathers as before, none in backward
        losses.append(loss)
        gradients.append(backward())
    assert all(torch.equal(loss.nan_to_num(), losses[0].nan_to_num()) for loss in losses)
    of_input, of_weight, _, of_bias, *_ = zip(*gradients, strict=True)
    wholes = [torch.cat(each) for each in (of_weight, of_bias) if each[0] is not None]
    return losses[0], [torch.stack(of_input).sum(0), *wholes]
