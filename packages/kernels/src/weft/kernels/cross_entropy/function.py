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
from .guess import guess
from .merged import LossShard, MergedStatistics, Upstream, find_correct, weigh_targets
from .options import Options, check, check_contiguous

# Starts the all-gather of this shard's statistics [N, columns] over the vocabulary's shards. Returns a function to wait
# for the result [shards, N, columns]. The columns, 3 to 6, are listed at `reference.statistics`.
StartGather = Callable[[Tensor], Callable[[], Tensor]]
# Sums a tensor over the ranks that share the tokens, perhaps in place.
SumOverRanks = Callable[[Tensor], Tensor]


def forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    denominator: Tensor | None = None,
    *,
    options: Options,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    gather: StartGather | None = None,
    all_reduce: SumOverRanks | None = None,
    backwards: list[None] | None = None,
) -> tuple[tuple[Tensor, ...], Tensors]:
    """Compute the requested outputs and the tensors saved for `backward`.

    The outputs are loss, lse, z-loss and accuracy, in this order, in float32 (float64 for float64 logits).

    logits: [..., V] with any strides, for the classes vocab_start to vocab_start + V of vocab_size. V may be 0.
    target: [...], class ids of the whole vocabulary. weight: [vocab_size]. Every shard gets the same target and the
        same weight.
    denominator: for "mean", divides the sum: a scalar, or two numbers for the two kinds of tokens' weights (see
        `mean_denominator`). None for the sum of the weights of tokens not ignored.
    gather: the all-gather of the shards' statistics; None for a single shard. all_reduce: the sum over ranks of a
        denominator computed here; None if this rank has all tokens. There is no other communication.
    backwards: if given, an empty list, to which each backward appends an entry. Forward may then also compute the
        logits' gradient, for a guess of the upstream gradient (`guess.py`). The first backward returns this gradient,
        computed again in the same memory if the guess was wrong. Any further backward, with retain_graph, computes the
        gradient in new memory: the caller may have overwritten the first.
    Raises ValueError as `check` does, before anything is computed or sent.
    """
    if vocab_size is None:
        vocab_size = vocab_start + (logits.shape[-1] if logits.ndim else 0)
    none_ignored = check(logits, target, weight, denominator, options, vocab_start, vocab_size)
    check_contiguous(logits, options)
    shard, passes = LossShard(vocab_start, vocab_size, options, none_ignored), select_passes(logits)
    if options.reduction == "mean" and denominator is None:
        wide = torch.promote_types(logits.dtype, torch.float32)
        denominator = mean_denominator(weight, target, options, wide, all_reduce, none_ignored)
    saved_weight, saved_denominator = weight, denominator  # saved for backward
    weight, denominator = unify_denominators(weight, denominator)
    guessed = dlogits = merged = None
    if backwards is not None and gather is None and logits.is_meta:
        dlogits = _empty_gradient(logits)  # a meta run allocates the gradient as a real run would, for memory estimates
    if backwards is None or gather is not None or logits.is_meta or not (use_triton(logits) or on_cpu(logits)):
        statistics = passes.statistics(logits, target, weight, shard)  # [N, columns]
    else:
        guessed, dlogits = guess(logits.device), _empty_gradient(logits)
        upstream = Upstream(guessed, None, denominator)
        statistics, merged = passes.statistics_and_gradient(logits, target, weight, upstream, shard, dlogits)
    gathered = statistics.unsqueeze(0) if gather is None else gather(statistics)()  # [shards, N, columns]
    loss, lse = passes.losses(gathered, target, weight, shard, merged)
    is_correct = find_correct(gathered, target, options.ignore_index) if options.return_token_accuracy else None
    saved = (logits, target, saved_weight, saved_denominator, gathered, guessed, dlogits)
    return outputs_of(loss, lse, is_correct, denominator, options), saved


def outputs_of(
    loss: Tensor, lse: Tensor | None, is_correct: Tensor | None, denominator: Tensor | None, options: Options
) -> tuple[Tensor, ...]:
    """The requested outputs, from each token's loss, lse and correctness.

    lse: required if options.gives_lse, otherwise ignored; is_correct likewise, for the accuracy. denominator: divides
    the sums for "mean", and is None otherwise.
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
    gather: StartGather | None = None,
    all_reduce: SumOverRanks | None = None,
    backwards: list[None] | None = None,
) -> Tensors:
    """The gradient of this shard's logits, in their shape and dtype; None for other operands. Communication: none.

    grads: the upstream gradients of the loss and, if returned, of the lse, with any strides. None stands for zeros.
    The keyword arguments are those of forward. gather and all_reduce are not used.
    """
    if not needed[0]:
        return None, None, None, None
    logits, target, weight, denominator, gathered, guessed, from_forward = saved
    assert logits is not None and target is not None and gathered is not None, "forward saves them"
    weight, denominator = unify_denominators(weight, denominator)
    if vocab_size is None:
        vocab_size = vocab_start + logits.shape[-1]
    shard = LossShard(vocab_start, vocab_size, options)
    upstream = Upstream(grads[0], grads[1] if options.return_lse else None, denominator)
    arguments = (logits, target, weight, gathered, upstream, shard)
    is_first = backwards == []
    if backwards is not None:
        backwards.append(None)
    if from_forward is not None and from_forward.is_meta and is_first:
        return from_forward.data, None, None, None
    if from_forward is not None and guessed is not None and is_first:
        # The caller may write to the returned gradient. `.data` has a version counter of its own, so this does not
        # count as a write to the saved tensor, for which autograd would raise in a second backward.
        dlogits = select_passes(logits).gradient(*arguments, from_forward.data, guessed)
        if is_recorded(logits):
            # A CUDA graph of this backward may be replayed without forward, when the caller may have overwritten the
            # gradient already. So each replay after the first must compute it: NaN as the guess is never right.
            guessed.data.fill_(math.nan)
        return dlogits, None, None, None
    dlogits = select_passes(logits).gradient(
        *arguments, logits if options.inplace_backward else _empty_gradient(logits)
    )
    if options.inplace_backward:
        torch.autograd.graph.increment_version(logits)  # makes autograd raise in another backward with these logits
        dlogits = dlogits.detach()
    return dlogits, None, None, None


def mean_denominator(
    weight: Tensor | None,
    target: Tensor,
    options: Options,
    dtype: torch.dtype,
    all_reduce: SumOverRanks | None,
    none_ignored: bool = False,
) -> Tensor:
    """Compute the denominator of "mean": the sum of the weights of all tokens not ignored, over all ranks.

    In the loss, the weight of a token is the class weight of its target, or 1 without class weights. In the z-loss and
    the accuracy, every token has the weight 1. If both kinds of weights are used (`Options.has_two_weights`),
    returns two numbers [2]: the sum of the class weights, and the number of tokens not ignored; otherwise a scalar.
    weight: of the classes, None: 1 each. all_reduce: sums over ranks; None: this rank has all tokens.
    none_ignored: whether the host knows that no token is ignored; see `LossShard`.
    """
    if weight is None and none_ignored:
        total = torch.full((), target.numel(), dtype=dtype, device=target.device)
    else:
        total = weigh_targets(weight, target.reshape(-1).long(), options.ignore_index, dtype).sum()
    if options.has_two_weights(weight):
        total = torch.stack([total, (target.long() != options.ignore_index).sum().to(dtype)])
    return total if all_reduce is None else all_reduce(total)


def unify_denominators(weight: Tensor | None, denominator: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Replace a denominator [2] of `mean_denominator` by a scalar that divides loss, z-loss and accuracy alike.

    The scalar is the number of tokens; in exchange, the class weights are multiplied by tokens / sum of weights.
    Returns the weights and the denominator: both unchanged if the denominator is a scalar already, or None.
    """
    if weight is None or denominator is None or denominator.ndim == 0:
        return weight, denominator
    weight_sum, tokens = denominator.unbind()
    # Without tokens the ratio would be 0 / 0, and NaN in the weights would reach the gradients of ignored tokens.
    ratio = torch.where(tokens == 0, 1.0, tokens.double() / weight_sum)
    return weight.double() * ratio, tokens


def _empty_gradient(logits: Tensor) -> Tensor:
    """Make contiguous memory for the gradient of the logits."""
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


class LossPasses(Protocol):
    """The passes over the logits, as functions of a module: `reference` in plain torch, `launch` with Triton kernels.

    `reference` documents the first three, `merged` documents `losses`. All rows N are rows of the flattened logits.
    """

    # (logits, target, weight, shard) -> this shard's statistics [N, columns].
    statistics: Callable[..., Tensor]
    # (logits, target, weight, upstream, shard, out) -> the statistics of a shard with all classes, and writes the
    # gradient of the logits to `out`. Also returns the rows' combined statistics if they are at hand, for `losses`.
    statistics_and_gradient: Callable[..., tuple[Tensor, MergedStatistics | None]]
    # (logits, target, weight, gathered statistics, upstream, shard, out, guessed=None) -> out, to which the gradient of
    # the logits was written.
    gradient: Callable[..., Tensor]
    # (gathered statistics, target, weight, shard, merged=None) -> loss and logsumexp of each token. merged: the second
    # result of `statistics_and_gradient`; if None, the shards' statistics are combined first.
    losses: Callable[..., tuple[Tensor, Tensor | None]]


def select_passes(logits: Tensor) -> LossPasses:
    """Return the passes for the logits' device: Triton kernels or plain torch."""
    if use_triton(logits):
        from . import launch  # imports triton, which a CPU installation may not have

        return launch
    return reference
