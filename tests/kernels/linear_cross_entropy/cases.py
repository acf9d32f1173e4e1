"""What the tests of linear cross-entropy share: inputs, the oracle, and what its gradients may err."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.cross_entropy.cases import max_error, torch_loss_and_gradient


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
    """Logits of about randn, the third token to be ignored where there is one; leaves that require gradients."""
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
    """Loss and gradients of torch's linear and cross-entropy: the linear in `dtype`, the loss no narrower than float32."""
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in case.leaves()]
    logits = F.linear(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None)
    wide = logits.detach().to(torch.promote_types(dtype, torch.float32))
    loss, dlogits = torch_loss_and_gradient(wide, case.target, case.upstream, **options)
    return loss, list(torch.autograd.grad(logits, leaves, dlogits.to(dtype)))


def check(case: Given, loss: Tensor, gradients: list[Tensor], **options: Any) -> None:
    """Loss and gradients within twice what eager torch errs in the same dtype."""
    true_loss, true_gradients = oracle(case, torch.float64, **options)
    eager_loss, eager_gradients = oracle(case, case.input.dtype, **options)
    for ours, true, eager in zip(
        (loss, *gradients), (true_loss, *true_gradients), (eager_loss, *eager_gradients), strict=True
    ):
        assert ours.shape == true.shape
        largest = float(true.abs().max()) if true.numel() else 0.0
        # Either may err little by luck, so eager's error is taken for no less than one rounding of the result.
        eager_error = max(max_error(eager, true), torch.finfo(ours.dtype).eps / 2 * largest)
        assert max_error(ours, true) <= 2 * eager_error + 4 * torch.finfo(torch.float32).eps * largest
