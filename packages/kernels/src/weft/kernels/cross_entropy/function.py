"""Cross-entropy of one shard of the vocabulary, forward and backward: the local tensors of the op."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import use_triton
from . import reference

REDUCTIONS = ("mean", "sum", "none")
LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TARGET_DTYPES = (torch.int32, torch.int64)


def forward(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int,
    reduction: str,
    denominator: float | None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss, float32 (float64 for float64 logits), and what `backward` needs of it.

    logits: [..., V], any strides: the classes vocab_start to vocab_start + V of vocab_size; a shard may be empty.
    target: [...], class ids in all of the vocabulary, the same on every shard.
    denominator: what "mean" divides by, in place of the count of tokens that are not ignored; 0 gives NaN, as in torch.
    gather: this shard's statistics [N, 3] -> those of all shards [shards, N, 3]; the only communication.
    Raises ValueError as `check` does, before anything is computed or sent.
    """
    check(logits, target, ignore_index, reduction, denominator, vocab_start, vocab_size)
    if vocab_size is None:
        vocab_size = vocab_start + logits.shape[-1]
    statistics = _passes(logits).statistics(
        logits, target, vocab_start=vocab_start, vocab_size=vocab_size, ignore_index=ignore_index
    )  # [N, 3]
    gathered = statistics.unsqueeze(0) if gather is None else gather(statistics)  # [shards, N, 3]
    if gathered.ndim != 3 or gathered.shape[1:] != statistics.shape:
        raise ValueError(
            f"gather returned a tensor of shape {tuple(gathered.shape)} for statistics of shape "
            f"{tuple(statistics.shape)}; stack the shards' statistics in a new first dim"
        )
    largest, log_sum, log_odds = reference.merge(gathered)  # [N] each
    saved = (logits, target, largest, log_sum, -torch.sigmoid(log_odds))
    loss = -F.logsigmoid(-log_odds).view(target.shape)
    loss = loss.masked_fill(target == ignore_index, 0)
    if reduction == "none":
        return loss, saved
    if reduction == "sum":
        return loss.sum(), saved
    return loss.sum() / _count(target, ignore_index, denominator), saved


def backward(
    saved: Sequence[Tensor],
    grad: Tensor,
    needed: Sequence[bool],
    *,
    ignore_index: int,
    reduction: str,
    denominator: float | None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor | None, None]:
    """The gradient of this shard's logits, in their shape and dtype, and none for the target; no communication.

    grad: of the loss's shape, any strides.
    """
    if not needed[0]:
        return None, None
    logits, target, largest, log_sum, true = saved
    ignored = target.reshape(-1) == ignore_index  # [N]
    if reduction == "mean":
        grad = grad / _count(target, ignore_index, denominator)
    scale = torch.where(ignored, 0, grad.reshape(-1).to(log_sum.dtype))  # [N]
    dlogits = _passes(logits).gradient(logits, target, largest, log_sum, scale, scale * true, vocab_start=vocab_start)
    return dlogits, None


def check(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    denominator: float | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> None:
    """Raises ValueError for what `forward` cannot take.

    Target values are checked on the CPU only: elsewhere reading them would make the host wait for the device, and a
    target that is no class gives a loss of NaN instead.
    """
    if logits.ndim < 1 or logits.dtype not in LOGITS_DTYPES:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} and dtype {logits.dtype}; give [..., classes] in "
            f"{', '.join(str(dtype) for dtype in LOGITS_DTYPES)}"
        )
    if target.dtype not in TARGET_DTYPES:
        raise ValueError(
            f"target has dtype {target.dtype}, not {' or '.join(str(dtype) for dtype in TARGET_DTYPES)}; "
            "give class ids (probabilities over the classes are not supported)"
        )
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target of shape {tuple(target.shape)} for logits of shape {tuple(logits.shape)}; "
            f"give one class id for each row: {tuple(logits.shape[:-1])}, classes being the last dim of logits"
        )
    if target.device != logits.device:
        raise ValueError(f"target is on {target.device}, logits on {logits.device}; move one to the other")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; choose one of {', '.join(map(repr, REDUCTIONS))}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise ValueError(f"ignore_index is {ignore_index!r}; give an int, negative to ignore no class")
    _check_denominator(denominator, reduction)
    _check_shard(logits.shape[-1], vocab_start, vocab_size)
    if target.device.type == "cpu":
        _check_classes(target, ignore_index, vocab_start + logits.shape[-1] if vocab_size is None else vocab_size)


def _check_denominator(denominator: float | None, reduction: str) -> None:
    if denominator is None:
        return
    if reduction != "mean":
        raise ValueError(f"denominator={denominator} with reduction={reduction!r}; only 'mean' divides; leave it None")
    if not (denominator >= 0 and math.isfinite(denominator)):
        raise ValueError(f"denominator is {denominator}; give the count of tokens over all ranks")


def _check_shard(V: int, vocab_start: int, vocab_size: int | None) -> None:
    if vocab_start < 0:
        raise ValueError(f"vocab_start is {vocab_start}; give the id of this shard's first class, 0 or more")
    if vocab_size is not None and vocab_start + V > vocab_size:
        raise ValueError(
            f"logits hold classes {vocab_start} to {vocab_start + V} of a vocabulary of {vocab_size}; "
            "give this shard's logits alone, not gathered ones, and the size of the whole vocabulary"
        )


def _check_classes(target: Tensor, ignore_index: int, vocab_size: int) -> None:
    wrong = ((target < 0) | (target >= vocab_size)) & (target != ignore_index)
    if not bool(wrong.any()):
        return
    index = tuple(wrong.nonzero()[0].tolist())
    raise ValueError(
        f"target{list(index) or ''} is {int(target[index])}, which is no class of {vocab_size} (0 to {vocab_size - 1})"
        f"; correct it, or use ignore_index ({ignore_index}) for a token without a class"
    )


class _Passes(Protocol):
    """The two passes over the logits, as `reference` describes them."""

    statistics: Callable[..., Tensor]
    gradient: Callable[..., Tensor]


def _passes(logits: Tensor) -> _Passes:
    if use_triton(logits):
        from . import launch  # imports triton, which a CPU run may not have

        return launch
    return reference


def _count(target: Tensor, ignore_index: int, denominator: float | None) -> Any:
    return (target != ignore_index).sum() if denominator is None else denominator
