"""Forward and backward of attention on local tensors, as functions of an `Op`, and attention with a cache.

In a traced graph, forward and backward are a custom torch op each, so a node each. The ops take local tensors. On
DTensors, `sharded.apply` unwraps the operands before the call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library

from ..dispatch.backend import has_data, is_compiling
from ..dispatch.op import Tensors
from ..random.philox import Part
from .compute import compute, compute_backward
from .options import AttentionOptions, Operands
from .ranges import Ranges

OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? documents, Tensor? dropout_key, Tensor? sinks"
# The fields of `AttentionOptions` in order; `order`, `queries` and `part` flattened to lists of numbers.
OPTIONS = (
    "int head_dim, bool causal, float? scale, SymInt? window, float? softcap, float dropout, int number, str? name, "
    "SymInt? first, SymInt[]? order, SymInt[]? queries, SymInt[]? part"
)


def traced_forward(operands: Operands, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """The output like query, and the logsumexp [B, heads, T]."""
    return _forward(*operands, *_flat(options))  # type: ignore[no-any-return]


def traced_backward(
    grad: Tensor, operands: Operands, output: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and sinks."""
    dquery, dkey, dvalue, dsinks = _backward(grad, output, lse, *operands, *_flat(options))
    return dquery, dkey, dvalue, None if operands[-1] is None else dsinks


@library.custom_op("weft::attention", mutates_args=(), schema=f"({OPERANDS}, {OPTIONS}) -> (Tensor, Tensor)")
def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    operands, options = _parsed(arguments)
    output, lse, _ = compute(operands, options)
    return output.contiguous(), lse.contiguous()


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, head_dim = arguments[0], arguments[6]
    sizes = (math.prod(query.shape[:-2]), query.shape[-1] // head_dim, query.shape[-2])
    lse = query.new_empty(sizes, dtype=torch.promote_types(query.dtype, torch.float32))
    return query.new_empty(query.shape), lse


@library.custom_op(
    "weft::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor output, Tensor lse, {OPERANDS}, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(grad: Tensor, output: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operands, options = _parsed(arguments)
    *gradients, dsinks = compute_backward(grad, operands, output, lse, None, options)
    dquery, dkey, dvalue = (each.contiguous() for each in gradients)
    return dquery, dkey, dvalue, lse.new_empty(0) if dsinks is None else dsinks


@_backward.register_fake
def _(grad: Tensor, output: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, *_, sinks = arguments[:6]
    dquery, dkey, dvalue = (each.new_empty(each.shape) for each in (query, key, value))
    return dquery, dkey, dvalue, lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _flat(options: AttentionOptions) -> tuple[Any, ...]:
    """The options as arguments of a custom op."""
    *fields, order, queries, part = options._replace(number=options.number - 2**64 * (options.number >= 2**63))
    runs = (None if each is None else [place for run in each for place in run] for each in (order, queries))
    return *fields, *runs, None if part is None else [part.offset, *part.sizes, *part.strides]


def _parsed(arguments: Sequence[Any]) -> tuple[Operands, AttentionOptions]:
    """The operands and options of a custom op's arguments: the reverse of `_flat`."""
    operands: Any = tuple(arguments[:6])
    *fields, order, queries, part = arguments[6:]
    order, queries = (
        None if each is None else tuple(zip(each[::2], each[1::2], strict=True)) for each in (order, queries)
    )
    if part is not None:
        dims = len(part) // 2
        part = Part(part[0], tuple(part[1 : 1 + dims]), tuple(part[1 + dims :]))
    options = AttentionOptions._make((*fields, order, queries, part))
    return operands, options._replace(number=options.number % 2**64)


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
        output, lse = traced_forward(operands, options)
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
        gradients = traced_backward(grad, operands, output, lse, options)
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
