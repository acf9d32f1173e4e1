"""Cross-entropy of one shard of the vocabulary, forward and backward: the local tensors of the op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import use_triton
from ..op import Tensors
from . import reference
from .options import Options, check
from .reference import Rows, Shard


def forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    denominator: Tensor | None = None,
    *,
    options: Options,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> tuple[tuple[Tensor, ...], Tensors]:
    """(loss,) or (loss, lse), float32 (float64 for float64 logits), and what `backward` needs.

    logits: [..., V], any strides: the classes vocab_start to vocab_start + V of vocab_size; a shard may be empty.
    target: [...], class ids in all of the vocabulary. weight: [vocab_size]. Both the same on every shard.
    denominator: a scalar, what "mean" divides by in place of the weights of the tokens that are not ignored.
    gather: this shard's statistics [N, 3 or 4] -> those of all shards [shards, N, 3 or 4]; the only communication.
    Raises ValueError as `check` does, before anything is computed or sent.
    """
    if vocab_size is None:
        vocab_size = vocab_start + (logits.shape[-1] if logits.ndim else 0)
    check(logits, target, weight, denominator, options, vocab_start, vocab_size)
    shard = _shard(options, vocab_start, vocab_size)
    statistics = _passes(logits).statistics(logits, target, _part(weight, logits, shard), shard)  # [N, 3 or 4]
    gathered = statistics.unsqueeze(0) if gather is None else gather(statistics)  # [shards, N, 3 or 4]
    if gathered.ndim != 3 or gathered.shape[1:] != statistics.shape:
        raise ValueError(
            f"gather returned a tensor of shape {tuple(gathered.shape)} for statistics of shape "
            f"{tuple(statistics.shape)}; stack the shards' statistics in a new first dim"
        )
    largest, log_sum, log_odds = reference.merge(gathered[..., :3])  # [N] each
    lse = largest + log_sum
    classes = target.reshape(-1)
    ignored = classes == options.ignore_index
    weights = None if weight is None else weight.to(lse.dtype)
    share = of_target(weights, classes, options.ignore_index, lse.dtype)  # [N]
    loss = -F.logsigmoid(-log_odds) * share * (1 - options.label_smoothing)
    if shard.sums:
        whole = vocab_size if weights is None else weights.sum()
        # Each over vocab_size before they are subtracted: both grow with it.
        others = (whole * largest - gathered[..., 3].sum(0)) / vocab_size + (whole / vocab_size) * log_sum
        loss = loss + options.label_smoothing * others
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    # Masked last: autograd forbids changing a view in place where it is an output.
    loss, lse = (each.view(target.shape).masked_fill(ignored.view(target.shape), 0) for each in (loss, lse))
    if options.reduction == "mean" and denominator is None:
        denominator = share.sum()
    if options.reduction != "none":
        loss = loss.sum()
    if denominator is not None:
        loss = loss / denominator
    saved = (logits, target, weight, denominator, largest, log_sum, log_odds)
    return ((loss, lse) if options.return_lse else (loss,)), saved


def backward(
    saved: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
    *,
    options: Options,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Tensors:
    """The gradient of this shard's logits, in their shape and dtype, and none for the rest; no communication.

    grads: of the loss, and where there is one of the lse; of their shapes, any strides. None for a gradient of zeros.
    """
    if not needed[0]:
        return None, None, None, None
    logits, target, weight, denominator, largest, log_sum, log_odds = saved
    assert logits is not None and target is not None, "forward saves them"
    assert largest is not None and log_sum is not None and log_odds is not None, "forward saves them"
    if vocab_size is None:
        vocab_size = vocab_start + logits.shape[-1]
    shard = _shard(options, vocab_start, vocab_size)
    classes = target.reshape(-1)
    ignored = classes == options.ignore_index
    weights = None if weight is None else weight.to(log_sum.dtype)

    grad = torch.zeros_like(log_sum) if grads[0] is None else grads[0].to(log_sum.dtype)
    if denominator is not None:
        grad = grad / denominator
    grad = torch.where(ignored, 0, grad.reshape(-1))  # [N]
    # d loss / d logit of class c = factor * p_c - spread * weight_c, and for the true class - pull more.
    share = of_target(weights, classes, options.ignore_index, grad.dtype)
    pull = grad * share * (1 - options.label_smoothing)
    even = torch.zeros_like(grad)  # what reaches all classes by their probability, besides the pull
    spread = None
    if shard.sums:
        spread = grad * (options.label_smoothing / vocab_size)
        even = even + spread * (vocab_size if weights is None else weights.sum())
    if options.z_loss:
        even = even + 2 * options.z_loss * torch.where(ignored, 0, largest + log_sum) * grad
    if len(grads) > 1 and grads[1] is not None:
        even = even + torch.where(ignored, 0, grads[1].reshape(-1).to(log_sum.dtype))
    true = even * torch.sigmoid(-log_odds) - pull * torch.sigmoid(log_odds)
    if spread is not None:
        true = true - spread * share
    true = torch.where(ignored, 0, true)

    rows = Rows(largest, log_sum, pull + even, true, spread)
    out = logits if options.inplace_backward else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    dlogits = _passes(logits).gradient(logits, target, _part(weight, logits, shard), rows, shard, out)
    if options.inplace_backward:
        torch.autograd.graph.increment_version(logits)  # whoever saved them is told, and a second backward
        dlogits = dlogits.detach()
    return dlogits, None, None, None


class _Passes(Protocol):
    """The two passes over the logits, as `reference` describes them."""

    statistics: Callable[..., Tensor]
    gradient: Callable[..., Tensor]


def _passes(logits: Tensor) -> _Passes:
    if use_triton(logits):
        from . import launch  # imports triton, which a CPU run may not have

        return launch
    return reference


def _shard(options: Options, vocab_start: int, vocab_size: int) -> Shard:
    cap = None if options.softcap is None else float(options.softcap)
    sums = options.label_smoothing > 0
    return Shard(vocab_start, vocab_size, options.ignore_index, float(options.logit_scale), cap, sums)


def _part(weight: Tensor | None, logits: Tensor, shard: Shard) -> Tensor | None:
    """The weights of this shard's classes, where the passes need them."""
    return weight[shard.start : shard.start + logits.shape[-1]] if weight is not None and shard.sums else None


def of_target(weights: Tensor | None, classes: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The weight of each token's class, [N]; 0 at a token to ignore. A target that is no class has made the loss NaN."""
    ignored = classes == ignore_index
    if weights is None:
        return (~ignored).to(dtype)
    if len(weights) == 0:
        return torch.zeros(len(classes), dtype=dtype, device=classes.device)
    return weights[classes.long().clamp(0, len(weights) - 1)].to(dtype).masked_fill(ignored, 0)
