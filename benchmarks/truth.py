"""The losses and gradients in float64, and the error allowed for a way to be timed.

Losses are checked over all tokens, gradients for ROWS of the tokens, from the first to the last. At 16384 tokens and
128256 classes, logits in float64 would be 17 GB, so logits are computed for a chunk of tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.losses import Made

ROWS = 64  # the checked rows of a gradient
CHUNK_BYTES = 1 << 30  # of logits in float64
# The allowed errors, relative to the largest element.
# ROUNDED: a unit in the last place of bf16, since ways round at different places.
# CHUNKED: for the weight's gradient, a sum over chunks of tokens, which some ways keep in bf16.
# SUMMED: for the weight's gradient of classes which are no token's target. It is a sum of small products of both
# signs, without large elements.
# EXACT: for float32 numbers computed with a GPU's fast exponentials.
ROUNDED, CHUNKED, SUMMED, EXACT = 2.0**-7, 2.0**-6, 2.0**-5, 2.0**-14


class Inaccurate(AssertionError):
    """The error of a way against float64 is larger than rounding explains."""


@dataclass(frozen=True, slots=True)
class Part:
    """A checked part of a way's result, with the true value."""

    figure: str  # the name of the error's figure
    told: str  # a description of the part
    of: Callable[[Made], Tensor]  # takes the part from the result
    truth: Tensor
    allowed: float  # the allowed error, relative to the largest element

    def error(self, way: str, made: Made) -> float:
        """The error relative to the largest element.

        Raises Inaccurate for a wrong shape, and for an error above `allowed`.
        """
        found = self.of(made).double()
        if found.shape != self.truth.shape:
            raise Inaccurate(f"{way}: {self.told} is of shape {tuple(found.shape)}, not {tuple(self.truth.shape)}")
        error, largest = float((found - self.truth).abs().max()), float(self.truth.abs().max())
        if not error <= self.allowed * largest:  # true for NaN
            raise Inaccurate(f"{way}: {self.told} errs by {error:.3g}; the largest element is {largest:.3g}")
        return error / largest if largest else 0.0


Truth = Sequence[Part]


def errors(way: str, made: Made, truth: Truth) -> dict[str, float]:
    """The errors of a way, by figure. Raises Inaccurate."""
    return {part.figure: part.error(way, made) for part in truth}


def of_logits(logits: Tensor, target: Tensor) -> Truth:
    """The true loss and gradient of a mean cross-entropy."""
    N, V = logits.shape
    logits, rows = logits.detach(), spread(N, like=target)
    loss = torch.stack([_losses(logits[some].double(), target[some]).sum() for some in _chunks(N, V)]).sum()
    return [
        Part("loss_error", "the loss", lambda made: made.loss, loss / N, ROUNDED),
        Part(
            "gradient_error", "the gradient", lambda made: made.gradients[0][rows],
            _dlogits(logits[rows].double(), target[rows]) / N, ROUNDED,
        ),
    ]  # fmt: skip


def of_products(x: Tensor, weight: Tensor, target: Tensor) -> Truth:
    """The true loss and gradients of a mean linear cross-entropy.

    The weight's gradient is checked for some classes which are targets of tokens, and for some which are not.
    """
    (N, H), V = x.shape, len(weight)
    x, wide, rows = x.detach(), weight.detach().double(), spread(N, like=target)
    held = target[rows[::2]].unique()
    is_free = torch.ones(V, dtype=torch.bool, device=target.device)
    is_free[target] = False
    free = is_free.nonzero().flatten()
    free = free[spread(len(free), ROWS // 2, like=target)]
    classes = torch.cat((held, free))
    loss, dweight = wide.new_zeros(()), wide.new_zeros(len(classes), H)
    for some in _chunks(N, V):
        part = x[some].double()
        logits = part @ wide.mT  # [n, V]
        loss += _losses(logits, target[some]).sum()
        dlogits = (logits[:, classes] - logits.logsumexp(1, keepdim=True)).exp()
        dlogits -= (target[some, None] == classes).double()
        dweight += dlogits.mT @ part
        del logits
    dx = _dlogits(x[rows].double() @ wide.mT, target[rows]) @ wide
    parts = [
        Part("loss_error", "the loss", lambda made: made.loss, loss / N, ROUNDED),
        Part("gradient_error", "the input's gradient", lambda made: made.gradients[0][rows], dx / N, ROUNDED),
        Part(
            "weight_gradient_error", "the weight's gradient", lambda made: made.gradients[1][held],
            dweight[: len(held)] / N, CHUNKED,
        ),
        Part(
            "free_classes_error", "the weight's gradient of classes without a token",
            lambda made: made.gradients[1][free], dweight[len(held) :] / N, SUMMED,
        ),
    ]  # fmt: skip
    return parts if len(free) else parts[:-1]


def of_a_shard(logits: Tensor, target: Tensor) -> Truth:
    """The true statistics and gradient of the first shard of classes, if the other shards' statistics add nothing.

    The logit of a target in another shard counts as 0.
    """
    N, V = logits.shape
    rows = spread(N, like=target)
    x, classes = logits.detach()[rows].double(), target[rows]
    here = (classes < V).nonzero().flatten()
    own = x.new_zeros(len(rows))
    own[here] = x[here, classes[here]]
    others = x.clone()
    others[here, classes[here]] = -torch.inf
    lse = others.logsumexp(1)
    dlogits = (x - torch.logaddexp(lse, own)[:, None]).exp()
    dlogits[here, classes[here]] -= 1
    return [
        Part("lse_error", "logsumexp without the target", lambda made: made.loss[rows, :2].double().sum(1), lse, EXACT),
        Part("target_logit_error", "the target's logit", lambda made: made.loss[rows, 2], own, EXACT),
        Part("gradient_error", "the gradient", lambda made: made.gradients[0][rows], dlogits / N, ROUNDED),
    ]


def spread(N: int, rows: int = ROWS, *, like: Tensor) -> Tensor:
    """At most `rows` indices, evenly spaced from 0 to N - 1, without repetition."""
    return torch.linspace(0, max(0, N - 1), min(N, rows), dtype=torch.float64, device=like.device).long()


def _losses(logits: Tensor, target: Tensor) -> Tensor:
    return logits.logsumexp(1) - logits.gather(1, target[:, None]).squeeze(1)


def _dlogits(logits: Tensor, target: Tensor) -> Tensor:
    """The gradient of the sum of the losses with respect to the logits."""
    dlogits = logits.softmax(1)
    dlogits[torch.arange(len(target), device=target.device), target] -= 1
    return dlogits


def _chunks(N: int, V: int) -> Iterator[slice]:
    step = max(1, CHUNK_BYTES // (8 * V))
    return (slice(start, start + step) for start in range(0, N, step))
