"""Forward and backward of attention on local tensors, as functions of an `Op`, and attention with a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..dispatch.backend import has_data, is_compiling
from ..dispatch.op import Tensors
from . import custom_ops
from .compute import compute, compute_backward
from .options import AttentionOptions
from .ranges import Ranges


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None = None,
    dropout_key: Tensor | None = None,
    sinks: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, Tensors]:
    """query [..., T, heads * D], key and value [..., S, kv_heads * D] -> the output like query; saved for `backward`.

    Grouped queries: heads is a multiple of kv_heads, and query head h reads key head h // (heads // kv_heads).
    documents: of each key, ids [..., S] or bounds [..., S, 2]. dropout_key: 64 bits. sinks: [heads].
    given: fields of `AttentionOptions`.
    Saves the operands, the output, a logsumexp for each row and head, and the ranges: two numbers for each query and
    for each key.
    """
    options, operands = AttentionOptions(**given), (query, key, value, documents, dropout_key, sinks)
    if _is_traced(query):
        output, lse = custom_ops.forward(operands, options)
        ranges = None
    else:
        output, lse, ranges = compute(operands, options)
    if ranges is None and documents is not None and documents.device.type == "cpu":
        documents = documents.clone()  # read in backward; a loader may fill the memory anew before, through numpy
    saved = (query, key, value, documents, dropout_key, sinks, output, lse)
    return output, (*saved, *(ranges or (None, None)))


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], **given: Any) -> Tensors:
    """The gradients of query, key, value and sinks; None for the other operands. grad: of the output."""
    options = AttentionOptions(**given)
    operands: Any = saved[:6]
    output, lse, keys, queries = saved[6:]
    assert output is not None and lse is not None, "forward saves them"
    if _is_traced(grad):
        gradients = custom_ops.backward(grad, operands, output, lse, options)
    else:
        ranges = None if keys is None or queries is None else Ranges(keys, queries)
        gradients = compute_backward(grad, operands, output, lse, ranges, options)
    dquery, dkey, dvalue, dsinks = gradients
    every = (dquery, dkey, dvalue, None, None, dsinks)
    return tuple([each if need else None for each, need in zip(every, needed, strict=False)])


def _is_traced(tensor: Tensor) -> bool:
    """Whether attention on this tensor runs as a custom torch op: under torch.compile, and on a fake tensor."""
    return is_compiling() or not has_data(tensor)


def forward_with_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    length: int,
    **given: Any,
) -> Tensor:
    """Attention of new tokens to the cached tokens and to each other; the new keys and values are written to the cache.

    query, key, value: of the new tokens.
    keys, values: the cache, [..., capacity, kv_heads * D], of which the first `length` tokens are filled.
    documents: ids [..., capacity] or bounds [..., capacity, 2]; only those of cached and new tokens are read.
    """
    new = key.shape[-2]
    keys.narrow(-2, length, new).copy_(key)
    values.narrow(-2, length, new).copy_(value)
    stop = length + new
    cached = keys.narrow(-2, 0, stop), values.narrow(-2, 0, stop)
    if documents is not None:
        documents = documents.narrow(query.ndim - 2, 0, stop)
    return forward(query, *cached, documents, None, sinks, **given)[0]
