"""Calls of every op for the tests of autocast, each beside torch's own ops, with the shapes of its operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from weft import kernels

from tests.kernels.cases import ints, normal

TOKENS, CLASSES = ints(11, 6, 5), ints(8, 6, 5)
EXPERTS = ints(8, 6, 5, 2)
TABLES = normal(5, 2).float(), normal(5, 2).float()
KEY = torch.tensor(3, dtype=torch.uint64)


def torch_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = [x.unflatten(-1, (2, 4)).transpose(1, 2) for x in (query, key, value)]
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2)


def torch_rope(x: Tensor) -> Tensor:
    first, second = x.unflatten(-1, (2, 2, 2)).unbind(-2)
    cos, sin = (table.unsqueeze(-2).to(x.dtype) for table in TABLES)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -2).flatten(-3)


def torch_dropout(x: Tensor) -> Tensor:
    return x * kernels.dropout(torch.ones_like(x), 0.5, KEY)


def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:  # in float32, as on CUDA: a CPU's list has no rms_norm
    return F.rms_norm(x.float() if x.dtype != torch.float64 else x, weight.shape, weight, 1e-6)


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # as on CUDA, again
    wide = [each.float() if each.dtype != torch.float64 else each for each in (x, weight, bias)]
    return F.layer_norm(wide[0], weight.shape, *wide[1:])


def torch_loss(ids: Tensor, logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def torch_grouped(offsets: Tensor, a: Tensor, b: Tensor) -> Tensor:
    first = int(offsets[0])
    return torch.cat([a[:first] @ b[0], a[first:] @ b[1]])


def torch_experts(chosen: Tensor, x: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Every expert on every token; autocast's dtype also for the weights, as a layer casts them to its input's."""
    matrices = zip(gate, up, down, strict=True)
    every = torch.stack([F.linear(torch_swiglu_linear(x, *each[:2]), each[2]) for each in matrices], -2)
    rows = every.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
    return (rows * weights[..., None].to(rows.dtype)).sum(-2)


def torch_gate(_: object, x: Tensor, score: Tensor) -> Tensor:
    return x * score.sigmoid()


def torch_route(scores: Tensor) -> Tensor:
    chosen = scores.to(wide(scores)).softmax(-1).topk(2).values
    return chosen / chosen.sum(-1, keepdim=True)


def torch_combine(ids: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    rows = y[ids.flatten().sort(stable=True).indices.argsort()].unflatten(0, ids.shape)
    return (rows * weights.to(wide(weights)).unsqueeze(-1)).sum(-2).to(y.dtype)


def torch_statistics(ids: Tensor, logits: Tensor) -> Tensor:
    flat = logits.flatten(0, 1).to(wide(logits))
    counts = ids.flatten().bincount(minlength=8)
    return torch.cat([counts, flat.softmax(-1).sum(0), flat.logsumexp(-1).square().sum().view(1)]).view(1, -1)


def torch_swiglu_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


PRODUCT = ((6, 5, 8), (8, 4))
# By op: Weft's and torch's, given ids; and the shapes of the operands.
OPS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...], Tensor | None]] = {
    "add": (lambda _, x, y: kernels.add(x, y), lambda _, x, y: x + y, ((6, 5, 8), (6, 5, 8)), None),
    "sigmoid_gate": (lambda _, *each: kernels.sigmoid_gate(*each), torch_gate, ((6, 5, 8), (6, 5, 1)), None),
    "add_layer_norm": (
        lambda _, *operands: kernels.add(*kernels.add_layer_norm(*operands)),
        lambda _, x, y, *more: x.to(wide(x)) + y + torch_layer_norm(x.to(wide(x)) + y, *more),
        ((6, 5, 8), (6, 5, 8), (8,), (8,)),
        None,
    ),
    "add_rms_norm": (
        lambda _, *operands: kernels.add(*kernels.add_rms_norm(*operands)),
        lambda _, x, y, weight: x.to(wide(x)) + y + torch_rms_norm(x.to(wide(x)) + y, weight),
        ((6, 5, 8), (6, 5, 8), (8,)),
        None,
    ),
    "all_gather_matmul": (lambda _, a, b: kernels.all_gather_matmul(a, b), lambda _, a, b: a @ b, PRODUCT, None),
    "attention": (
        lambda _, *qkv: kernels.attention(*qkv, head_dim=4),
        lambda _, *qkv: torch_attention(*qkv),
        ((6, 5, 8),) * 3,
        None,
    ),
    "combine": (lambda ids, y, w: kernels.combine(y, ids, w), torch_combine, ((60, 8), (6, 5, 2)), EXPERTS),
    "cross_entropy": (lambda ids, x: kernels.cross_entropy(x, ids), torch_loss, ((6, 5, 8),), CLASSES),
    "dispatch": (
        lambda ids, x: kernels.dispatch(x, ids, num_experts=8)[0],
        lambda ids, x: x.flatten(0, 1)[ids.flatten().sort(stable=True).indices // 2],
        ((6, 5, 8),),
        EXPERTS,
    ),
    "dropout": (lambda _, x: kernels.dropout(x, 0.5, KEY), lambda _, x: torch_dropout(x), ((6, 5, 8),), None),
    "embedding": (kernels.embedding, F.embedding, ((11, 8),), TOKENS),
    "experts": (
        lambda chosen, x, *operands: kernels.experts(x, chosen, *operands),
        lambda chosen, x, *operands: torch_experts(chosen, x, *operands),
        ((6, 5, 8), (6, 5, 2), (2, 4, 8), (2, 4, 8), (2, 8, 4)),
        ints(2, 6, 5, 2),
    ),
    "geglu": (lambda _, x, y: kernels.geglu(x, y), lambda _, x, y: F.gelu(x) * y, ((6, 5, 8), (6, 5, 8)), None),
    "gelu": (lambda _, x: kernels.gelu(x), lambda _, x: F.gelu(x), ((6, 5, 8),), None),
    "grouped_matmul": (
        lambda offsets, a, b: kernels.grouped_matmul(a, b, offsets),
        torch_grouped,
        ((7, 8), (2, 8, 4)),
        torch.tensor([3, 7], dtype=torch.int32),
    ),
    "layer_norm": (lambda _, *operands: kernels.layer_norm(*operands), lambda _, *operands: torch_layer_norm(*operands),
                   ((6, 5, 8), (8,), (8,)), None),
    "linear": (lambda _, *operands: kernels.linear(*operands), lambda _, *operands: F.linear(*operands),
               ((6, 5, 8), (4, 8), (4,)), None),
    "linear_cross_entropy": (
        lambda ids, x, w: kernels.linear_cross_entropy(x, w, ids, chunk_tokens=7),
        lambda ids, x, w: torch_loss(ids, F.linear(x, w)),
        ((6, 5, 8), (8, 8)),
        CLASSES,
    ),
    "matmul": (lambda _, a, b: kernels.matmul(a, b), lambda _, a, b: a @ b, PRODUCT, None),
    "matmul_reduce_scatter": (
        lambda _, a, b: kernels.matmul_reduce_scatter(a, b),
        lambda _, a, b: a @ b,
        PRODUCT,
        None,
    ),
    "qkv_linear": (
        lambda _, *operands: torch.cat(kernels.qkv_linear(*operands, cos=TABLES[0], sin=TABLES[1]), -1),
        lambda _, x, q, k, v: torch.cat([torch_rope(F.linear(x, q)), torch_rope(F.linear(x, k)), F.linear(x, v)], -1),
        ((6, 5, 8), (8, 8), (8, 8), (4, 8)),
        None,
    ),
    "rms_norm": (lambda _, x, w: kernels.rms_norm(x, w), lambda _, x, w: torch_rms_norm(x, w), ((6, 5, 8), (8,)), None),
    "rms_norm_rope": (
        lambda _, x, weight: kernels.rms_norm_rope(x, weight, *TABLES),
        lambda _, x, weight: torch_rope(torch_rms_norm(x.unflatten(-1, (2, 4)), weight).flatten(-2)),
        ((6, 5, 8), (4,)),
        None,
    ),
    "rope": (lambda _, x: kernels.rope(x, *TABLES), lambda _, x: torch_rope(x), ((6, 5, 8),), None),
    "route": (lambda _, x: kernels.route(x, 2)[1], lambda _, x: torch_route(x), ((6, 5, 8),), None),
    "router_statistics": (
        lambda ids, x: kernels.router_statistics(x, ids),
        torch_statistics,
        ((6, 5, 8),),
        EXPERTS,
    ),
    "swiglu": (lambda _, x, y: kernels.swiglu(x, y), lambda _, x, y: F.silu(x) * y, ((6, 5, 8), (6, 5, 8)), None),
    "swiglu_linear": (
        lambda _, *operands: kernels.swiglu_linear(*operands),
        lambda _, *operands: torch_swiglu_linear(*operands),
        ((6, 5, 8), (4, 8), (4, 8)),
        None,
    ),
}  # fmt: skip
