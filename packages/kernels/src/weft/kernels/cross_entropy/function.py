"""Forward and backward of cross-entropy on one shard of the vocabulary, with local tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..dispatch.backend import is_recorded, on_cpu, use_triton
from ..dispatch.op import Tensors
from . import reference
from .guess import Once, guess
from .merged import Merged, Shard, Upstream, correct, of_target
from .options import Options, check, check_contiguous

# Starts the all-gather of this shard's statistics [N, 3 to 6]. Returns a function to wait for the result [shards, N,
# 3 to 6].
Gather = Callable[[Tensor], Callable[[], Tensor]]
Count = Callable[[Tensor], Tensor]  # all-reduces a sum over this rank's tokens, perhaps in place


def forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    denominator: Tensor | None = None,
    *,
    options: Options,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    gather: Gather | None = None,
    count: Count | None = None,
    once: Once | None = None,
) -> tuple[tuple[Tensor, ...], Tensors]:
    """Compute the requested outputs and the tensors saved for `backward`.

    The outputs are loss, lse, z-loss and accuracy, in this order, in float32 (float64 for float64 logits).

    logits: [..., V] with any strides, for the classes vocab_start to vocab_start + V of vocab_size. V may be 0.
    target: [...], class ids of the whole vocabulary. weight: [vocab_size]. Every shard gets the same target and the
        same weight.
    denominator: for "mean", divides the sum. None: the sum of the weights of tokens not ignored. [2]: see `per_token`.
    gather: see `Gather`. count: see `Count`; used for "mean" without a denominator. There is no other communication.
    once: if given, forward may also compute the gradient for a guessed upstream gradient (`guess.py`), and the first
        backward returns it, recomputed if the guess was wrong.
    Raises ValueError as `check` does, before anything is computed or sent.
    """
    if vocab_size is None:
        vocab_size = vocab_start + (logits.shape[-1] if logits.ndim else 0)
    all_count = check(logits, target, weight, denominator, options, vocab_start, vocab_size)
    check_contiguous(logits, options)
    shard, passes = Shard(vocab_start, vocab_size, options, all_count), passes_on(logits)
    if options.reduction == "mean" and denominator is None:
        wide = torch.promote_types(logits.dtype, torch.float32)
        denominator = mean_denominator(weight, target, options, wide, count, all_count)
    class_weight, divided = weight, denominator  # saved for backward
    weight, denominator = per_token(weight, denominator)
    guessed = dlogits = merged = None
    if once is None or gather is not None or not (use_triton(logits) or on_cpu(logits)):
        statistics = passes.statistics(logits, target, weight, shard)  # [N, 3 to 6]
        if once is not None and gather is None and logits.is_meta:
            dlogits = _like(logits)  # a meta run allocates the gradient as a real run would, for memory estimates
    else:
        guessed, dlogits = guess(logits.device), _like(logits)
        upstream = Upstream(guessed, None, denominator)
        statistics, merged = passes.statistics_and_gradient(logits, target, weight, upstream, shard, dlogits)
    gathered = statistics.unsqueeze(0) if gather is None else gather(statistics)()  # [shards, N, 3 to 6]
    loss, lse = passes.losses(gathered, target, weight, shard, merged)
    is_correct = correct(gathered, target, options.ignore_index) if options.return_token_accuracy else None
    saved = (logits, target, class_weight, divided, gathered, guessed, dlogits)
    return outputs_of(loss, lse, is_correct, denominator, options), saved


def outputs_of(
    loss: Tensor, lse: Tensor | None, is_correct: Tensor | None, denominator: Tensor | None, options: Options
) -> tuple[Tensor, ...]:
    """The requested outputs, from each token's loss, lse and correctness.

    lse: required if options.gives_lse, otherwise ignored. denominator: for "mean", divides the sums.
    """

    def reduced(each: Tensor) -> Tensor:
        each = each if options.reduction == "none" else each.sum()
        return each if denominator is None else each / denominator

    outputs = [reduced(loss)]
    if options.return_lse:
        assert lse is not None, "given where options.gives_lse"
        outputs.append(lse)
    if options.return_z_loss:
        assert lse is not None, "given where options.gives_lse"
        outputs.append(reduced(options.z_loss * lse.square()))
    if is_correct is not None:
        outputs.append(reduced(is_correct))
    return tuple(outputs)


def backward(
    saved: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
    *,
    options: Options,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    gather: Gather | None = None,
    count: Count | None = None,
    once: Once | None = None,
) -> Tensors:
    """The gradient of this shard's logits, in their shape and dtype; None for other operands. Communication: none.

    grads: the upstream gradients of the loss and, if returned, of the lse, with any strides. None stands for zeros.
    """
    if not needed[0]:
        return None, None, None, None
    logits, target, weight, denominator, gathered, guessed, from_forward = saved
    assert logits is not None and target is not None and gathered is not None, "forward saves them"
    weight, denominator = per_token(weight, denominator)
    if vocab_size is None:
        vocab_size = vocab_start + logits.shape[-1]
    shard = Shard(vocab_start, vocab_size, options)
    upstream = Upstream(grads[0], grads[1] if options.return_lse else None, denominator)
    rest = (logits, target, weight, gathered, upstream, shard)
    if from_forward is not None and guessed is not None and once is not None and not once.given:
        once.given = True
        # `.data` has its own version counter, so a caller may write to the gradient without invalidating the saved
        # tensor.
        dlogits = passes_on(logits).gradient(*rest, from_forward.data, guessed)
        if is_recorded(logits):
            # A CUDA graph of backward alone may be replayed. After one replay the caller may have overwritten the
            # gradient. A NaN guess equals no upstream gradient, so every later replay recomputes.
            guessed.data.fill_(math.nan)
        return dlogits, None, None, None
    dlogits = passes_on(logits).gradient(*rest, logits if options.inplace_backward else _like(logits))
    if options.inplace_backward:
        torch.autograd.graph.increment_version(logits)  # makes autograd raise in another backward with these logits
        dlogits = dlogits.detach()
    return dlogits, None, None, None


def mean_denominator(
    weight: Tensor | None,
    target: Tensor,
    options: Options,
    dtype: torch.dtype,
    count: Count | None,
    all_count: bool = False,
) -> Tensor:
    """The denominator of "mean": the sum of weights of all tokens not ignored; without weights, the number of tokens.

    If z-loss or accuracy is computed beside class weights, returns [2]: the sum of weights and the number of tokens.
    See `Options.weighs_apart` and `per_token`.
    all_count: see `Shard`.
    """
    if weight is None and all_count:
        total = torch.full((), target.numel(), dtype=dtype, device=target.device)
    else:
        total = of_target(weight, target.reshape(-1).long(), options.ignore_index, dtype).sum()
    if options.weighs_apart(weight):
        total = torch.stack([total, (target.long() != options.ignore_index).sum().to(dtype)])
    return total if count is None else count(total)


def per_token(weight: Tensor | None, denominator: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Let one denominator serve all parts of a mean.

    For a denominator [2], multiply the weights by tokens / sum of weights, and return the number of tokens as the
    denominator. Otherwise return both unchanged.
    """
    if weight is None or denominator is None or denominator.ndim == 0:
        return weight, denominator
    of_weights, tokens = denominator.unbind()
    ratio = torch.where(tokens == 0, 1.0, tokens.double() / of_weights)  # without tokens 0 / 0; the gradient is 0
    return weight.double() * ratio, tokens


def _like(logits: Tensor) -> Tensor:
    """Contiguous memory for the gradient of the logits."""
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


class Passes(Protocol):
    """The passes over the logits, implemented by `reference` and by `launch`.

    `reference` documents them, except `losses`, which `merged` documents.
    """

    statistics: Callable[..., Tensor]
    losses: Callable[..., tuple[Tensor, Tensor | None]]
    gradient: Callable[..., Tensor]
    statistics_and_gradient: Callable[..., tuple[Tensor, Merged | None]]


def passes_on(logits: Tensor) -> Passes:
    """The passes for the logits' device: Triton kernels or plain torch."""
    if use_triton(logits):
        from . import launch  # imports triton, which a CPU installation may not have

        return launch
    return reference
