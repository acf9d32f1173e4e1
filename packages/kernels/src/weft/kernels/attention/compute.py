"""Attention of local tensors: softmax(query @ key.T * scale) @ value, per head.

A GPU, and Triton's interpreter, run the kernels (`launch`). A CPU runs torch's fused attention on stretches of queries
(`stretches`), or plain torch by blocks of queries for options that torch's lacks (`blocks`). None of the three holds a
tensor of T x S.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..dispatch.backend import is_shape_alone, on_cpu, use_triton
from ..dispatch.token_order import Runs, as_laid, as_read
from . import blocks, stretches
from .options import AttentionOptions, Drop, Operands, Scores, Visible, VisibleInCall, drop_for
from .ranges import Ranges


class AttentionPasses(Protocol):
    """The forward and backward pass, implemented by the modules `blocks` (see its docstrings) and `launch`."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


def is_fused(query: Tensor, *, plain_scores: bool) -> bool:
    """Whether a call runs torch's fused attention for CPUs. plain_scores: the call has no softcap and no dropout."""
    return plain_scores and on_cpu(query) and not use_triton(query)


def _is_stub(query: Tensor, operands: Operands, options: AttentionOptions) -> bool:
    """Whether the call allocates results without computing. True on meta tensors, with a single exception.

    Inside `meta_as_cpu`, a call without documents, order, dropout and softcap runs torch's fused attention, and so
    allocates as much as on a CPU. For all other calls, the steps of the computation follow from data.
    """
    if not query.is_meta or is_shape_alone(query):
        return query.is_meta
    is_plain = operands[3] is None and options.order is None and not options.dropout
    return not (is_plain and is_fused(query, plain_scores=options.scores.softcap is None))


def compute(operands: Operands, options: AttentionOptions) -> tuple[Tensor, Tensor, Ranges | None]:
    """Attention of one call -> the output like query, the logsumexp [B, heads, T], and ranges for `compute_backward`.

    The logsumexp and the ranges have the queries in the sequence's order, also where memory has another order. The
    ranges are None if the call did not need them: torch's fused attention computes without.
    """
    query, key, value, _, _, sinks = operands
    if query.numel() == 0 or key.numel() == 0 or _is_stub(query, operands, options):
        shape = (math.prod(query.shape[:-2]), query.shape[-1] // options.head_dim, query.shape[-2])
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        return output, torch.full(shape, -torch.inf, dtype=wide, device=query.device), None
    q = _ascending(flat(query), options.runs)
    k, v = _ascending(flat(key), options.order), _ascending(flat(value), options.order)
    visible, scores = VisibleInCall(operands, options), options.scores
    output, lse = attend(q, k, v, visible, sinks, drop_for(operands, options), scores)
    return _like(_as_stored(output, options.runs), query), lse, visible.known_ranges


def compute_backward(
    grad: Tensor, operands: Operands, output: Tensor, lse: Tensor, ranges: Ranges | None, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and sinks. ranges: from `compute`; None: computed here, if needed."""
    query, key, value, _, _, sinks = operands
    if query.numel() == 0 or key.numel() == 0 or _is_stub(query, operands, options):
        dquery, dkey, dvalue = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
        return dquery, dkey, dvalue, None if sinks is None else torch.zeros_like(sinks)
    g, q = _ascending(flat(grad), options.runs), _ascending(flat(query), options.runs)
    k, v = _ascending(flat(key), options.order), _ascending(flat(value), options.order)
    out, visible = _ascending(flat(output), options.runs), VisibleInCall(operands, options, ranges)
    dq, dk, dv, dsinks = attend_backward(
        g, q, k, v, out, lse, visible, sinks, drop_for(operands, options), options.scores
    )
    dkey, dvalue = _like(_as_stored(dk, options.order), key), _like(_as_stored(dv, options.order), value)
    return _like(_as_stored(dq, options.runs), query), dkey, dvalue, dsinks


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, sinks: Tensor | None, drop: Drop | None, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Attention of tokens in the sequence's order, by the fastest implementation for the device and the options.

    q [B, T, heads * D], k and v [B, S, kv_heads * D] -> the output like q, the logsumexp [B, heads, T].
    sinks: [heads], a further logit of every row, without a value; the logsumexp includes the sink.
    """
    passes = select_passes(q)
    if is_fused(q, plain_scores=scores.softcap is None and drop is None):
        calls = visible.fused_calls(q.dtype)
        fused = stretches.forward(q, k, v, calls, sinks, head_dim=scores.head_dim, scale=scores.scale)
        if not stretches.has_masks(calls) or are_finite(fused[0]):
            return fused
        passes = blocks  # a mask of torch's lets NaN pass, as 0 * NaN
    return passes.forward(q, k, v, visible.ranges, sinks, drop, **scores._asdict())


def attend_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Visible,
    sinks: Tensor | None,
    drop: Drop | None,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and sinks; see `attend`. g: of the output.

    out, lse: the results of `attend`; where the queries also see more keys, merged with the results for these.
    """
    passes = select_passes(q)
    if is_fused(q, plain_scores=scores.softcap is None and drop is None):
        calls = visible.fused_calls(q.dtype)
        fused = stretches.backward(g, q, k, v, out, lse, calls, head_dim=scores.head_dim, scale=scores.scale)
        if not stretches.has_masks(calls) or are_finite(*fused):
            return *fused, None if sinks is None else stretches.sinks_gradient(g, out, lse, sinks)
        passes = blocks
    return passes.backward(g, q, k, v, out, lse, visible.ranges, sinks, drop, **scores._asdict())


def are_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are finite, judged by each tensor's sum: also False if only the sum overflows."""
    return all(math.isfinite(each.sum(dtype=torch.promote_types(each.dtype, torch.float32))) for each in tensors)


def select_passes(query: Tensor) -> AttentionPasses:
    """`launch` where Triton runs, otherwise `blocks`. Neither is torch's fused attention: see `is_fused`."""
    if use_triton(query):
        from . import launch  # imports triton, which a CPU installation may not have

        return launch
    return blocks


def flat(x: Tensor) -> Tensor:
    """[..., T, W] -> [B, T, W]"""
    return x if x.ndim == 3 else x.reshape(-1, *x.shape[-2:])


def _like(x: Tensor, original: Tensor) -> Tensor:
    """x [B, T, W] in the shape of `original`."""
    return x if original.ndim == 3 else x.view(original.shape)


def _ascending(x: Tensor, runs: Runs | None) -> Tensor:
    """Reorder x [B, T, W] from memory order `runs` to the sequence's order. None: x already has this order."""
    return x if runs is None or _ascend(runs) else as_read(x, runs, 1)


def _as_stored(x: Tensor, runs: Runs | None) -> Tensor:
    """Reorder x [B, T, W] from the sequence's order to memory order `runs`: the reverse of `_ascending`."""
    return x if runs is None or _ascend(runs) else as_laid(x, runs, 1)


def _ascend(runs: Runs) -> bool:
    """Whether memory order `runs` is the sequence's order."""
    return list(runs) == sorted(runs)
