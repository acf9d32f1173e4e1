"""Routing in plain torch: the definition of the ops, and the computation on a CPU and in float64.

N tokens, E experts, k choices of each token, hidden size H. No one-hot matrices: gather, topk, index_select.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST_SUM = 1e-20  # added to the sum of chosen sigmoids, as in transformers' DeepseekV3TopkRouter


@dataclass(frozen=True, slots=True)
class Router:
    """The options of one call of `route`, checked by `sharded.route`."""

    k: int  # experts of a token
    score: str = "softmax"  # or "sigmoid"
    softmax_after: bool = False  # choose by the scores themselves, then take the softmax of the chosen scores alone
    normalize: bool = True  # divide the weights by their sum
    scale: float = 1.0  # factor of the weights
    groups: Sequence[int] = ()  # (groups of experts, groups that a token may choose from); () without groups

    @property
    def is_over_chosen(self) -> bool:
        """Whether the weights are a softmax over the chosen scores alone. A normalized softmax gives the same."""
        return self.score == "softmax" and (self.softmax_after or self.normalize)


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of sums and weights: float32, or float64 where an operand has float64."""
    return torch.float64 if any(each.dtype == torch.float64 for each in tensors) else torch.float32


def route(scores: Tensor, bias: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
    """scores [..., E] -> weights [..., k] in `wide_dtype`, experts [..., k] int32."""
    wide = scores.to(wide_dtype(scores))
    values, allowed = wide, None
    is_adjusted = bias is not None or bool(router.groups)
    if is_adjusted:
        if router.score == "sigmoid":
            values = wide.sigmoid()
        elif not router.softmax_after:
            values = wide.softmax(-1)
        values = values if bias is None else values + bias.to(wide.dtype)
    if router.groups:
        groups, chosen = router.groups
        # [..., groups, experts of a group]
        members = values.reshape(*values.shape[:-1], groups, values.shape[-1] // groups)
        of_groups = members.topk(min(2, members.shape[-1]), -1).values.sum(-1)  # [..., groups]
        allowed = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, _highest(of_groups, chosen), True)
        allowed = allowed.unsqueeze(-1).expand(members.shape).flatten(-2)
    experts = _highest(values, router.k, allowed)
    chosen_scores = wide.gather(-1, experts)
    if is_adjusted:  # a NaN makes the whole softmax NaN, also where its expert is not among the chosen
        chosen_scores = chosen_scores.masked_fill(values.gather(-1, experts).isnan(), float("nan"))
    if router.is_over_chosen:
        weights = chosen_scores.softmax(-1)
    elif router.score == "softmax":
        weights = (chosen_scores - wide.logsumexp(-1, keepdim=True)).exp_()
    else:
        weights = chosen_scores.sigmoid()
        if router.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return weights * router.scale if router.scale != 1 else weights, experts.to(torch.int32)


def _highest(values: Tensor, k: int, allowed: Tensor | None = None) -> Tensor:
    """The indices, int64, of the k highest values along the last dim, in descending order of value.

    Of equal values, the lower index comes first. NaN is above every number, as in torch.topk.
    allowed: bool like values. Values where `allowed` is False count as lower than all further values.
    """
    bits: Tensor = values.contiguous().view(torch.int64 if values.dtype == torch.float64 else torch.int32)
    most = torch.iinfo(bits.dtype).max
    # Integers in the order of the values, 0 for 0.0 and for -0.0. is_below: -1 for a set sign bit, else 0.
    is_below = bits >> (8 * bits.itemsize - 1)
    keys = (is_below & most).bitwise_xor_(bits).sub_(is_below).masked_fill_(values.isnan(), most)
    if values.dtype == torch.float64:  # no bits are left for the index
        if allowed is not None:
            keys = keys.masked_fill(~allowed, torch.iinfo(torch.int64).min)
        return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    count = values.shape[-1]
    last = torch.arange(count - 1, -1, -1, device=values.device)
    keys = keys.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(last)
    if allowed is not None:
        keys = keys.masked_fill(~allowed, torch.iinfo(torch.int64).min)
    return keys.topk(k, -1).indices


def route_backward(scores: Tensor, experts: Tensor, grad: Tensor, router: Router) -> Tensor:
    """The gradient of the scores [..., E], in their dtype. grad: of the weights, [..., k]."""
    dtype = wide_dtype(scores)
    wide, index = scores.to(dtype), experts.long()
    grad = grad.to(dtype) * router.scale
    if router.score == "softmax" and not router.is_over_chosen:
        p = wide.softmax(-1)
        dot = (grad * p.gather(-1, index)).sum(-1, keepdim=True)
        return (p * (torch.zeros_like(p).scatter_(-1, index, grad) - dot)).to(scores.dtype)
    chosen = wide.gather(-1, index)
    if router.is_over_chosen:
        w = chosen.softmax(-1)
        chosen_grad = w * (grad - (grad * w).sum(-1, keepdim=True))
    else:
        s = chosen.sigmoid()
        if router.normalize:
            total = s.sum(-1, keepdim=True) + LEAST_SUM
            grad = (grad - (grad * s).sum(-1, keepdim=True) / total) / total
        chosen_grad = grad * s * (1 - s)
    return torch.zeros_like(scores).scatter_(-1, index, chosen_grad.to(scores.dtype))


def sort_by_expert(experts: Tensor, num_experts: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """experts [..., k] -> source [N * k], positions [N * k], offsets [num_experts], all int32.

    source: token * k + choice of each sorted row. positions: the sorted row of each choice, the inverse permutation.
    offsets: the end of the rows of each expert of first .. first + num_experts - 1. Other experts' rows are the last.
    """
    ids = experts.reshape(-1) - first
    ids = ids.masked_fill((ids < 0) | (ids >= num_experts), num_experts)
    sorted_ids, source = ids.sort(stable=True)
    bounds = torch.arange(num_experts, device=ids.device, dtype=ids.dtype)
    offsets = torch.searchsorted(sorted_ids, bounds, right=True, out_int32=True)
    return source.to(torch.int32), invert(source), offsets


def invert(source: Tensor) -> Tensor:
    """The inverse of a permutation [R], int32."""
    numbers = torch.arange(len(source), dtype=torch.int32, device=source.device)
    return torch.empty_like(numbers).scatter_(0, source.long(), numbers)


def gather_rows(x: Tensor, positions: Tensor, k: int) -> Tensor:
    """x [N, H], positions [N * k] -> rows [N * k, H]: rows[positions[token * k + choice]] = x[token]."""
    source = invert(positions)
    return x.index_select(0, torch.div(source, k, rounding_mode="floor"))


def sum_rows(y: Tensor, positions: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """y [N * k, H], positions [N * k], weights [N, k] -> [N, H] in the dtype of y.

    The sum of a token's rows, y[positions[token * k + choice]], times their weights (None: 1): in `wide_dtype`, in the
    order of the choices.
    """
    index = positions.view(-1, k)
    dtype = wide_dtype(y) if weights is None else wide_dtype(y, weights)
    factors = None if weights is None else weights.to(dtype)
    if y.dtype == dtype and y.numel():
        return F.embedding_bag(index, y, mode="sum", per_sample_weights=factors)  # reads each row once
    total = y.new_zeros(index.shape[0], y.shape[1], dtype=dtype)
    for j in range(k):
        rows = y.index_select(0, index[:, j]).to(dtype)
        total += rows if factors is None else rows * factors[:, j, None]
    return total.to(y.dtype)


def sum_rows_backward(
    grad: Tensor, y: Tensor, positions: Tensor, weights: Tensor, dy: Tensor | None, dweights: Tensor | None
) -> None:
    """Write the gradients of y and of the weights of `sum_rows`; not a gradient which is None.

    grad: [N, H], of the output. dy: [N * k, H], weights times rows of grad. dweights: [N, k], dot products of rows of
    y and grad.
    """
    index = positions.view(weights.shape)
    dtype = wide_dtype(y, weights)
    wide, factors = grad.to(dtype), weights.to(dtype)
    for j in range(weights.shape[1]):
        if dy is not None:
            dy.index_copy_(0, index[:, j].long(), (wide * factors[:, j, None]).to(y.dtype))
        if dweights is not None:
            dweights[:, j] = (y.index_select(0, index[:, j]).to(dtype) * wide).sum(-1)


def sequence_load(experts: Tensor, num_experts: int) -> Tensor:
    """experts [B, T, k] -> [B, num_experts] in float32: how often each expert was chosen in a sequence."""
    index = experts.reshape(experts.shape[0], experts.shape[1] * experts.shape[2]).long()
    counts = torch.zeros(experts.shape[0], num_experts, device=experts.device)
    return counts.scatter_add_(1, index, counts.new_ones(1).expand(index.shape))


def sequence_balance(logits: Tensor, load: Tensor, length: int) -> Tensor:
    """logits [B, T, E], load [B, E] -> [1]: the sum over b, t, e of load[b, e] / length * softmax(logits)[b, t, e]."""
    dtype = wide_dtype(logits)
    return (logits.to(dtype).softmax(-1).sum(1) * (load.to(dtype) / length)).sum().reshape(1)


def sequence_balance_backward(logits: Tensor, load: Tensor, length: int, grad: Tensor) -> Tensor:
    """The gradient of the logits [B, T, E] of `sequence_balance`, in their dtype. grad: a number."""
    dtype = wide_dtype(logits)
    p, slope = logits.to(dtype).softmax(-1), (load.to(dtype) / length * grad.to(dtype))[:, None]  # [B, 1, E]
    return (p * (slope - (p * slope).sum(-1, keepdim=True))).to(logits.dtype)


def statistics(logits: Tensor, experts: Tensor) -> Tensor:
    """logits [N, E], experts [N, k] -> a row [2 * E + 1] of `router_statistics`, in `wide_dtype`."""
    wide = logits.to(wide_dtype(logits))
    E = logits.shape[1]
    index = experts.reshape(-1).long()
    counts = wide.new_zeros(E).scatter_add_(0, index, wide.new_ones(1).expand(index.shape))
    squares = wide.logsumexp(-1).square().sum().reshape(1)
    return torch.cat([counts, wide.softmax(-1).sum(0), squares])


def statistics_backward(logits: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the logits [N, E], in their dtype. grad: of the row [2 * E + 1]."""
    wide = logits.to(wide_dtype(logits))
    E = logits.shape[1]
    grad = grad.to(wide.dtype)
    p, of_sums = wide.softmax(-1), grad[E : 2 * E]
    of_tokens = 2 * grad[2 * E] * wide.logsumexp(-1, keepdim=True) - (p @ of_sums)[:, None]  # [N, 1]
    return (p * (of_sums + of_tokens)).to(logits.dtype)
