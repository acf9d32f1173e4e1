"""What the losses and their gradients are in float64, and how far a way may be from it before it is not timed.

A loss is of all tokens, a gradient of some: ROWS of them, from the first to the last. Whole logits in float64 would be 17 GB at
16384 tokens and 128256 classes, so they are made some tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.losses import Made

ROWS = 64  # of a gradient
CHUNK_BYTES = 1 << 30  # of logits in float64
# How much of the largest element an error may be. ROUNDED: an ulp of bf16, since what is compared rounded at different places.
# CHUNKED: the weight's gradient is a sum over chunks of tokens, which some keep in bf16.  SUMMED: of a class that is no token's
# it is a sum of small products of both signs, and no element of it stands out.  EXACT: of float32, by a GPU's fast exponentials.
ROUNDED, CHUNKED, SUMMED, EXACT = 2.0**-7, 2.0**-6, 2.0**-5, 2.0**-14


class Inaccurate(AssertionError):
    """A way is farther from float64 than rounding explains."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of what a way makes.

    figure: the name of its error.  told: what it is.  of: takes it from what was made.  allowed: of the largest element.
    """

    figure: str
    told: str
    of: Callable[[Made], Tensor]
    truth: Tensor
    allowed: float

    def error(self, way: str, made: Made) -> float:
        """Over the largest element. Raises Inaccurate."""
        found = self.of(made).double()
        if found.shape != self.truth.shape:
            raise Inaccurate(f"{way}: {self.told} is of shape {tuple(found.shape)}, not {tuple(self.truth.shape)}")
        error, largest = float((found - self.truth).abs().max()), float(self.truth.abs().max())
        if not error <= self.allowed * largest:  # a NaN is no less
            raise Inaccurate(f"{way}: {self.told} errs by {error:.3g}, of {largest:.3g} at the most")
        return error / largest if largest else 0.0


Truth = Sequence[Part]


def errors(way: str, made: Made, truth: Truth) -> dict[str, float]:
    """By the names of figures. Raises Inaccurate."""
    return {part.figure: part.error(way, made) for part in truth}


def of_logits(logits: Tensor, target: Tensor) -> Truth:
    """Of a mean cross-entropy."""
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
    """Of a mean linear cross-entropy: gradients of some tokens, of classes that are a token's and of classes that are not."""
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
            "free_classes_error", "the weight's gradient of classes that are no token's",
            lambda made: made.gradients[1][free], dweight[len(held) :] / N, SUMMED,
        ),
    ]  # fmt: skip
    return parts if len(free) else parts[:-1]


def of_a_shard(logits: Tensor, target: Tensor) -> Truth:
    """Of the first classes, where the other shards' statistics add nothing: the logit of a target that they hold counts as 0."""
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
        Part("lse_error", "logsumexp of the others", lambda made: made.loss[rows, :2].double().sum(1), lse, EXACT),
        Part("target_logit_error", "the target's logit", lambda made: made.loss[rows, 2], own, EXACT),
        Part("gradient_error", "the gradient", lambda made: made.gradients[0][rows], dlogits / N, ROUNDED),
    ]


def spread(N: int, rows: int = ROWS, *, like: Tensor) -> Tensor:
    """Indices from the first of N to the last, each once."""
    return torch.linspace(0, max(0, N - 1), min(N, rows), dtype=torch.float64, device=like.device).long()


def _losses(logits: Tensor, target: Tensor) -> Tensor:
    return logits.logsumexp(1) - logits.gather(1, target[:, None]).squeeze(1)


def _dlogits(logits: Tensor, target: Tensor) -> Tensor:
    """Of the sum of the losses."""
    dlogits = logits.softmax(1)
    dlogits[torch.arange(len(target), device=target.device), target] -= 1
    return dlogits


def _chunks(N: int, V: int) -> Iterator[slice]:
    step = max(1, CHUNK_BYTES // (8 * V))
    return (slice(start, start + step) for start in range(0, N, step))
