"""Linear cross-entropy of one shard of the vocabulary, forward and backward: the local tensors of the op.

Where the upstream gradient is one number, the gradients are made in forward as if it were 1, from the logits that are
there: three GEMMs a chunk. Otherwise backward computes the logits again: four.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cross_entropy.function import Count, Gather, mean_denominator, passes_on
from ..cross_entropy.options import Form, Options, check
from ..cross_entropy.reference import Shard, Upstream
from ..op import Tensors
from .chunks import Product, chunks_of, sweep
from .gradients import Sums, Wanted, may_be_in_24_bits, scaled


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
    chunk_tokens: int | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    shards: int = 1,
    gather: Gather | None = None,
    count: Count | None = None,
) -> tuple[tuple[Tensor, ...], Tensors]:
    """(loss,) or (loss, lse), float32 (float64 for float64 input), and what `backward` needs.

    input: [..., H]. linear_weight: [V, H], linear_bias: [V], of the classes vocab_start to vocab_start + V of vocab_size, all of
    the input's dtype. target, weight, denominator: as of cross-entropy.
    wanted: the dtypes of the gradients that backward will be asked for.  shards: how many there are of the vocabulary.
    gather: see `Gather`; called once a chunk, the next chunk's GEMM running before what it returned is called.
    count: see `Count`; for "mean" without a denominator.
    """
    V = len(linear_weight)
    if vocab_size is None:
        vocab_size = vocab_start + V
    form = Form((*input.shape[:-1], V), input.dtype, input.device)
    check(form, target, weight, denominator, options, vocab_start, vocab_size)
    product = _product(input, linear_weight, linear_bias, target)
    chunks = chunked(input, target, wanted, chunk_tokens, vocab_size, shards, 1 if gather is None else 2)
    shard, passes = Shard(vocab_start, vocab_size, options), passes_on(input)
    if options.reduction == "mean" and denominator is None:
        wide = torch.promote_types(input.dtype, torch.float32)
        denominator = mean_denominator(weight, product.classes, options.ignore_index, wide, count)
    upstream = sums = None
    if in_forward(options, input.dtype, wanted):
        upstream, sums = Upstream(torch.ones((), device=input.device), None, denominator), Sums(product, wanted, chunks)
    found: list[tuple[Tensor, Tensor, Tensor]] = []  # of each chunk the statistics, the loss and the lse
    for rows, logits, gathered in sweep(product, weight, shard, chunks, upstream, gather):
        found.append((gathered, *passes.losses(gathered, product.classes[rows], weight, shard)))
        if sums is not None:
            sums.add(rows, logits)
    nothing = torch.zeros(0, dtype=torch.promote_types(input.dtype, torch.float32), device=input.device)
    loss, lse = (torch.cat([nothing, *(each[i] for each in found)]).reshape(target.shape) for i in (1, 2))
    if options.reduction != "none":
        loss = loss.sum()
    if denominator is not None:
        loss = loss / denominator
    outputs = (loss, lse) if options.return_lse else (loss,)
    if sums is not None:
        dx = None if sums.dx is None else sums.dx.view(input.shape)
        return outputs, (input.new_empty(0), dx, sums.dweight, sums.dbias)
    statistics = (
        torch.cat([gathered for gathered, _, _ in found], 1) if found else nothing.new_empty(1, 0, shard.columns)
    )
    return outputs, (input, linear_weight, target, linear_bias, weight, denominator, statistics)


def in_forward(options: Options, dtype: torch.dtype, wanted: Wanted) -> bool:
    """Whether gradients are made in forward and multiplied by the upstream gradient afterwards."""
    return options.made_ahead(dtype) and any(each is not None for each in wanted)


def backward(
    saved: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
    *,
    options: Options,
    wanted: Wanted,
    chunk_tokens: int | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    shards: int = 1,
    gather: Gather | None = None,
    count: Count | None = None,
    reuse: bool = False,
) -> Tensors:
    """The gradients of input, linear_weight and linear_bias; of the input what this shard adds to it. No communication.

    reuse: whether the gradients that forward made may be given away: nobody comes for them again, or was told not to.
    """
    asked = tuple(each if need else None for each, need in zip(wanted, (needed[0], needed[1], needed[3]), strict=True))
    input = saved[0]
    assert input is not None, "forward saves it, or an empty tensor of its dtype"
    if all(each is None for each in asked):
        return (None,) * 6
    if in_forward(options, input.dtype, wanted):
        assert grads[0] is not None, "the loss is the only output"
        made = [
            None if dtype is None or part is None else scaled(part, grads[0], dtype, reuse)
            for part, dtype in zip(saved[1:], asked, strict=True)
        ]
        return made[0], made[1], None, made[2], None, None

    _, linear_weight, target, linear_bias, weight, denominator, statistics = saved
    assert linear_weight is not None and target is not None and statistics is not None, "forward saves them"
    if vocab_size is None:
        vocab_size = vocab_start + len(linear_weight)
    product = _product(input, linear_weight, linear_bias, target)
    chunks = chunked(input, target, wanted, chunk_tokens, vocab_size, shards, 1)
    shard, passes = Shard(vocab_start, vocab_size, options), passes_on(input)
    sums, space = Sums(product, asked, chunks), product.space(chunks)
    for rows in chunks:
        loss, lse = (_of_rows(grad, rows) for grad in (*grads, None)[:2])
        upstream = Upstream(loss, lse, denominator)
        logits = product.logits(rows, space)
        dlogits = passes.gradient(logits, product.classes[rows], weight, statistics[:, rows], upstream, shard, logits)
        sums.add(rows, dlogits)
        del logits, dlogits
    del space  # before the sums are rounded
    dx = None if sums.dx is None else sums.dx.view(input.shape)
    totals = zip((sums.dweight, sums.dbias), asked[1:], strict=True)
    dweight, dbias = (None if total is None else total.to(dtype) for total, dtype in totals)
    return dx, dweight, None, dbias, None, None


def _of_rows(grad: Tensor | None, rows: slice) -> Tensor | None:
    """The gradient that arrived for some rows: its part, or all of it where it is one number."""
    return grad if grad is None or grad.ndim == 0 else grad.reshape(-1)[rows]


def chunked(
    input: Tensor, target: Tensor, wanted: Wanted, chunk_tokens: int | None, vocab_size: int, shards: int, held: int
) -> list[slice]:
    """The chunks of the tokens, the same on every shard; see `chunks_of`."""
    share = -(-vocab_size // shards)
    sum_bytes = share * input.shape[-1] if may_be_in_24_bits(input.dtype, wanted) else 0
    return chunks_of(target.numel(), chunk_tokens, share, held, input, sum_bytes)


def _product(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor) -> Product:
    x = input.reshape(target.numel(), input.shape[-1])  # [N, H]
    return Product(x, linear_weight, linear_bias, target.reshape(-1))
