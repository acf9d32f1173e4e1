"""Forward and backward of linear cross-entropy on one shard of the vocabulary, with local tensors.

If the loss is a scalar, forward computes the gradients from each chunk's logits, for an upstream gradient of 1: three
GEMMs a chunk. Backward multiplies them by the upstream gradient. Otherwise backward computes the logits again: four
GEMMs a chunk.

Also checks the operands of the matrix product (`check_factors`). `check` of cross-entropy checks target, weight and
denominator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..cross_entropy.function import (
    StartGather,
    SumOverRanks,
    mean_denominator,
    outputs_of,
    select_passes,
    unify_denominators,
)
from ..cross_entropy.merged import LossShard, Upstream, find_correct
from ..cross_entropy.options import LOGITS_DTYPES, Options, TensorForm, check
from ..dispatch.arguments import check_tensors, described, is_int
from ..dispatch.op import Tensors
from .chunks import LogitFactors, chunks_of, longest, part_tokens, parts_of, sweep
from .gradients import ProductGradients, Wanted, may_be_in_24_bits, scale_gradient


def forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    denominator: Tensor | None = None,
    *,
    options: Options,
    wanted: Wanted,
    compute_dtype: torch.dtype | None = None,
    chunk_tokens: int | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    shards: int = 1,
    gather: StartGather | None = None,
    all_reduce: SumOverRanks | None = None,
) -> tuple[tuple[Tensor, ...], Tensors]:
    """Compute the outputs of cross-entropy and the tensors saved for `backward`.

    The outputs are float32 (float64 for float64 logits).

    input: [..., H]. linear_weight: [V, H], linear_bias: [V], for the classes vocab_start to vocab_start + V of
        vocab_size.
    target, weight, denominator: as for cross-entropy.
    compute_dtype: of the GEMMs. If None, the input's dtype, which weight and bias must then have.
    wanted: the dtypes of the gradients backward will be asked for.
    shards: the number of shards of the vocabulary.
    gather: the all-gather of the shards' statistics, called once for each part; None for a single shard. The next
        part's GEMM is started before waiting for the gather.
    all_reduce: the sum over ranks of a denominator computed here; None if this rank has all tokens.
    """
    V = len(linear_weight)
    if vocab_size is None:
        vocab_size = vocab_start + V
    dtype = compute_dtype or input.dtype
    wide = torch.promote_types(dtype, torch.float32)
    form = TensorForm((*input.shape[:-1], V), dtype, input.device)
    none_ignored = check(form, target, weight, denominator, options, vocab_start, vocab_size)
    product = _product(input, linear_weight, linear_bias, target, dtype)
    buffers = 1 if gather is None else 2
    chunks, tokens = cut_chunks(input, target, dtype, wanted, chunk_tokens, vocab_size, shards, buffers)
    shard, passes = LossShard(vocab_start, vocab_size, options, none_ignored), select_passes(product.x)
    if options.reduction == "mean" and denominator is None:
        denominator = mean_denominator(weight, product.classes, options, wide, all_reduce, none_ignored)
    saved_weight, saved_denominator = weight, denominator  # saved for backward
    weight, denominator = unify_denominators(weight, denominator)
    upstream = sums = None
    if in_forward(options, dtype, wanted):
        upstream, sums = (
            Upstream(torch.ones((), device=input.device), None, denominator),
            ProductGradients(product, wanted, chunks),
        )
    parts: list[tuple[Tensor, Tensor, Tensor | None]] = []  # each part's statistics, loss and lse
    is_correct: list[Tensor] = []
    for part in sweep(product, weight, shard, chunks, tokens, upstream, gather):
        gathered, classes = part.gathered, product.classes[part.rows]
        parts.append((gathered, *passes.losses(gathered, classes, weight, shard)))
        if options.return_token_accuracy:
            is_correct.append(find_correct(gathered, classes, options.ignore_index))
        if sums is not None and part.dlogits is not None:
            sums.add(part.chunk, part.dlogits)
    empty = torch.zeros(0, dtype=wide, device=input.device)

    def join(parts: Iterable[Tensor | None]) -> Tensor:
        return torch.cat([empty, *(each for each in parts if each is not None)]).reshape(target.shape)

    loss = join(each for _, each, _ in parts)
    lse = join(each for _, _, each in parts) if options.gives_lse else None
    accuracy = join(is_correct) if options.return_token_accuracy else None
    outputs = outputs_of(loss, lse, accuracy, denominator, options)
    if sums is not None:
        dx = None if sums.dx is None else sums.dx.view(input.shape)
        return outputs, (product.x.new_empty(0), dx, sums.dweight, sums.dbias)
    statistics = (
        torch.cat([gathered for gathered, _, _ in parts], 1) if parts else empty.new_empty(1, 0, shard.options.columns)
    )
    return outputs, (input, linear_weight, target, linear_bias, saved_weight, saved_denominator, statistics)


def in_forward(options: Options, dtype: torch.dtype, wanted: Wanted) -> bool:
    """Whether forward computes the gradients, which backward multiplies by the upstream gradient."""
    return options.gradient_in_forward(dtype) and any(each is not None for each in wanted)


def backward(
    saved: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
    *,
    options: Options,
    wanted: Wanted,
    compute_dtype: torch.dtype | None = None,
    chunk_tokens: int | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    shards: int = 1,
    gather: StartGather | None = None,
    all_reduce: SumOverRanks | None = None,
    reuse: bool = False,
) -> Tensors:
    """The gradients of input, linear_weight and linear_bias. Communication: none.

    The input's gradient is this shard's summand only: the sum over the shards is left to the caller.
    reuse: whether backward may return the very tensors computed in forward, because no second backward can follow.
    """
    wanted_dtypes = tuple(
        each if need else None for each, need in zip(wanted, (needed[0], needed[1], needed[3]), strict=True)
    )
    input = saved[0]
    assert input is not None, "forward saves the input, or an empty tensor with the dtype of the GEMMs"
    if all(each is None for each in wanted_dtypes):
        return (None,) * 6
    dtype = compute_dtype or input.dtype
    if in_forward(options, dtype, wanted):
        assert grads[0] is not None, "the loss is the only output"
        gradients = [
            None if wanted_dtype is None or part is None else scale_gradient(part, grads[0], wanted_dtype, reuse)
            for part, wanted_dtype in zip(saved[1:], wanted_dtypes, strict=True)
        ]
        return gradients[0], gradients[1], None, gradients[2], None, None

    _, linear_weight, target, linear_bias, weight, denominator, statistics = saved
    assert linear_weight is not None and target is not None and statistics is not None, "forward saves these tensors"
    weight, denominator = unify_denominators(weight, denominator)
    if vocab_size is None:
        vocab_size = vocab_start + len(linear_weight)
    product = _product(input, linear_weight, linear_bias, target, dtype)
    chunks, tokens = cut_chunks(input, target, dtype, wanted, chunk_tokens, vocab_size, shards, 1)
    shard, passes = LossShard(vocab_start, vocab_size, options), select_passes(product.x)
    sums, gradient_buffer = ProductGradients(product, wanted_dtypes, chunks), product.gradient_buffer(chunks)
    logits_buffer = product.logits_buffer(longest([rows for chunk in chunks for rows in parts_of(chunk, tokens)]))
    for chunk in chunks:
        dlogits = (logits_buffer if gradient_buffer is None else gradient_buffer)[: chunk.stop - chunk.start]
        for rows in parts_of(chunk, tokens):
            loss, lse = (_of_rows(grad, rows) for grad in (grads[0], grads[1] if options.return_lse else None))
            upstream = Upstream(loss, lse, denominator)
            logits = product.logits(rows, logits_buffer)
            out = dlogits[rows.start - chunk.start : rows.stop - chunk.start]
            passes.gradient(logits, product.classes[rows], weight, statistics[:, rows], upstream, shard, out)
        sums.add(chunk, dlogits)
        del logits, dlogits, out
    del logits_buffer, gradient_buffer  # freed before the sums are rounded
    dx = None if sums.dx is None else sums.dx.view(input.shape)
    totals = zip((dx, sums.dweight, sums.dbias), wanted_dtypes, strict=True)
    dx, dweight, dbias = (None if total is None else total.to(wanted_dtype) for total, wanted_dtype in totals)
    return dx, dweight, None, dbias, None, None


def _of_rows(grad: Tensor | None, rows: slice) -> Tensor | None:
    """The upstream gradient of some rows; a scalar is for all rows."""
    return grad if grad is None or grad.ndim == 0 else grad.reshape(-1)[rows]


def cut_chunks(
    input: Tensor,
    target: Tensor,
    dtype: torch.dtype,
    wanted: Wanted,
    chunk_tokens: int | None,
    vocab_size: int,
    shards: int,
    buffers: int,
) -> tuple[list[slice], int | None]:
    """Return the chunks of the tokens, and the number of tokens in a part: the same on every shard.

    dtype: of the GEMMs. See `chunks_of` and `part_tokens`.
    """
    share = -(-vocab_size // shards)
    sum_bytes = share * input.shape[-1] if may_be_in_24_bits(dtype, wanted) else 0
    like = input.new_empty(0, dtype=dtype)
    return chunks_of(target.numel(), chunk_tokens, share, buffers, like, sum_bytes), part_tokens(share, buffers, like)


def _product(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, dtype: torch.dtype
) -> LogitFactors:
    """The factors cast to the dtype of the GEMMs, and the target, as a `LogitFactors`."""
    x = input.reshape(target.numel(), input.shape[-1]).to(dtype)  # [N, H]
    bias = None if linear_bias is None else linear_bias.to(dtype)
    return LogitFactors(x, linear_weight.to(dtype), bias, target.reshape(-1))


def cast_form(input: Tensor, compute_dtype: torch.dtype | None) -> TensorForm:
    """Return the form of the input as the GEMMs use it, cast to compute_dtype.

    Raises ValueError for a compute_dtype in which there is no loss.
    """
    if compute_dtype is not None and compute_dtype not in LOGITS_DTYPES:
        raise ValueError(
            f"compute_dtype is {compute_dtype}; give one of {', '.join(map(str, LOGITS_DTYPES))}, or None for "
            f"the input's dtype"
        )
    return TensorForm(tuple(input.shape), compute_dtype or input.dtype, input.device)


def check_operands(op: str, *operands: Tensor | None) -> None:
    """Raise ValueError for operands which are no tensors: input, linear_weight, target, linear_bias and weight."""
    check_tensors(op, ("input", "linear_weight", "target", "linear_bias", "weight"), *operands, optional=2)


def check_factors(
    input: TensorForm,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    chunk_tokens: int | None,
    compute_dtype: torch.dtype | None,
) -> None:
    """Raise ValueError for factors, chunk_tokens or dtypes which do not fit together. input: from `cast_form`."""
    if linear_weight.ndim != 2 or not input.shape or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy takes input [..., H] and linear_weight [V, H], got {input.shape} and "
            f"{tuple(linear_weight.shape)}"
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy takes a linear_bias of shape {tuple(linear_weight.shape[:1])}, got "
            f"{tuple(linear_bias.shape)}"
        )
    for name, tensor in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if tensor is None:
            continue
        is_as_input = tensor.dtype == input.dtype if compute_dtype is None else tensor.is_floating_point()
        if not is_as_input or tensor.device != input.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, input {input.dtype} on {input.device}; convert one of "
                f"them, or give a compute_dtype for both"
            )
    if chunk_tokens is not None and not (is_int(chunk_tokens) and chunk_tokens >= 1):
        raise ValueError(
            f"chunk_tokens is {described(chunk_tokens)}; give a number of tokens, 1 or more, or None to choose "
            f"automatically"
        )
