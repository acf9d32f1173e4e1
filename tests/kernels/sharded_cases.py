"""Every op on whole tensors, with torch's equivalent, and its communication on a mesh."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from weft import kernels
from weft.mesh import Layout, Shard
from weft.reshard import distribute, layout_of

from tests.kernels.cases import ints, normal, rotate, rotate_neighbours, torch_cross_entropy
from tests.kernels.experts.cases import one_by_one
from tests.support import philox


@dataclass(frozen=True)
class Case:
    """An op on whole tensors, and torch's equivalent. Floats take gradients; `constants` and integers do not."""

    op: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    constants: tuple[int, ...] = ()
    communicates: Callable[..., list[str]] = field(default=lambda *layouts: [])  # in forward, from the layouts

    def needs_grad(self, i: int) -> bool:
        return self.tensors[i].is_floating_point() and i not in self.constants


def attend(query: Tensor, key: Tensor, value: Tensor, head_dim: int) -> Tensor:
    q, k, v = (x.unflatten(-1, (-1, head_dim)).transpose(-3, -2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(-3, -2).flatten(-2)


def drop(x: Tensor) -> Tensor:
    keep = philox.kept(torch.arange(x.numel()).reshape(x.shape), 0.25, 7)
    return x * keep / 0.75


def cross_entropy_collectives(reduction: str, logits: Layout, target: Layout) -> list[str]:
    """The docstring's collectives: a gather where V is sharded; "mean" counts tokens over their axes."""
    counted = reduction == "mean" and bool(target.shard_order)
    return ["all-reduce"] * counted + ["all-gather"] * bool(logits.shard_order.get(logits_dims - 1))


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, **options: object) -> Tensor:
    return kernels.linear_cross_entropy(x, weight, target, **options)


def linear_cross_entropy_collectives(reduction: str, x: Layout, weight: Layout, target: Layout) -> list[str]:
    """A gather a chunk of two of this rank's tokens where V is cut; "mean" counts over the axes that cut the tokens."""
    tokens = x.local_shape((N, 3), dist.get_rank())[0]
    gathers = bool(weight.shard_order.get(0)) * -(-tokens // 2)
    return ["all-reduce"] * (reduction == "mean" and bool(target.shard_order)) + ["all-gather"] * gathers


def by_group(a: Tensor, b: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """The last row is of no group."""
    bias = torch.zeros(3, 7, dtype=a.dtype) if bias is None else bias
    return torch.cat([a[:2] @ b[0] + bias[0], a[2:4] @ b[2] + bias[2], torch.zeros(1, 7, dtype=a.dtype)])


def mixed(x: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    """experts, with the choices sharded as the tokens are; gate stands for up, too."""
    chosen, weights = CHOSEN, WEIGHTS
    if isinstance(x, DTensor):
        layout = layout_of(x)
        rows = layout.replace(**{axis: "R" for axis in layout.mesh.axis_names if layout[axis] != Shard(0)})
        chosen, weights = (distribute(each, rows) for each in (chosen, weights))
    return kernels.experts(x, chosen, weights, gate, gate, down)


def statistics(logits: Tensor, experts: Tensor) -> Tensor:
    flat = logits.reshape(-1, V)
    return torch.cat(
        [experts.flatten().bincount(minlength=V), flat.softmax(-1).sum(0), flat.logsumexp(-1).square().sum().view(1)]
    )


def added(*outputs: Tensor) -> Tensor:
    return reduce(kernels.add, outputs)


# The sizes are uneven over 2 and leave an empty shard over 4, but for heads.
B, T, V, H, N = 3, 5, 5, 6, 5
logits_dims = 3
ANGLE = torch.outer(torch.arange(T).double(), torch.tensor([1.0, 0.3]).double())  # [T, D / 2]
TARGET = torch.where(ints(3, B, T) == 0, -100, ints(V, B, T))
ENDS = torch.tensor([2, 2, 4], dtype=torch.int32)
CHOSEN, WEIGHTS = torch.tensor([[0, 2], [2, 0], [2, 0], [0, 2], [2, 0]]), normal(5, 2)  # expert 1 has no tokens
CASES = {
    "linear": Case(kernels.linear, F.linear, (normal(B, T, 5), normal(7, 5))),
    "linear-bias": Case(kernels.linear, F.linear, (normal(B, 5), normal(7, 5), normal(7))),
    "linear-relu": Case(
        partial(kernels.linear, activation="relu"),
        lambda *t: F.linear(*t).relu(),
        (normal(B, 5), normal(7, 5), normal(7)),
    ),
    "linear-of-silu": Case(
        partial(kernels.linear, input_activation="silu"),
        lambda x, w: F.linear(F.silu(x), w),
        (normal(B, 5), normal(7, 5)),
    ),
    "matmul": Case(
        lambda a, b, residual: kernels.matmul(a, b, residual=residual, alpha=0.5, beta=2.0),
        lambda a, b, residual: a @ b / 2 + 2 * residual,
        (normal(B, 5), normal(5, 7), normal(B, 7)),
    ),
    "matmul-batch": Case(kernels.matmul, torch.matmul, (normal(B, T, 5), normal(B, 5, 7))),
    "qkv_linear": Case(
        lambda x, weight, bias: added(*kernels.qkv_linear(x, *[weight] * 3, *[bias] * 3)),
        lambda x, weight, bias: 3 * F.linear(x, weight, bias),
        (normal(B, 5), normal(7, 5), normal(7)),
    ),
    "qkv_linear-rope": Case(
        lambda x, weight, *t: added(*kernels.qkv_linear(x, *[weight] * 3, **dict(zip(("cos", "sin"), t, strict=True)))),
        lambda x, weight, *t: 2 * rotate(x @ weight.T, *t) + x @ weight.T,
        (normal(T, 5), normal(16, 5), ANGLE.cos(), ANGLE.sin()),
        (2, 3),
    ),
    "swiglu_linear": Case(
        kernels.swiglu_linear,
        lambda x, gate, up: F.silu(x @ gate.T) * (x @ up.T),
        (normal(B, 5), normal(7, 5), normal(7, 5, seed=1)),
    ),
    "experts": Case(
        mixed,
        lambda x, gate, down: one_by_one(CHOSEN, x, WEIGHTS, gate, gate, down),
        (normal(5, 6), normal(3, 5, 6), normal(3, 6, 5)),
    ),
    "grouped_matmul": Case(kernels.grouped_matmul, by_group, (normal(5, 6), normal(3, 6, 7), ENDS)),
    "grouped_matmul-relu": Case(
        lambda a, b, bias: kernels.grouped_matmul(a, b, ENDS, bias=bias, activation="relu"),  # plain offsets are whole
        lambda a, b, bias: by_group(a, b, ENDS, bias).relu(),
        (normal(5, 6), normal(3, 6, 7), normal(3, 7)),
    ),
    "grouped_matmul-residual": Case(
        lambda a, b, residual: kernels.grouped_matmul(a, b, ENDS, residual=residual, alpha=0.5, beta=2.0),
        lambda a, b, residual: by_group(a, b, ENDS) / 2 + 2 * residual * (torch.arange(5) < ENDS[-1])[:, None],
        (normal(5, 6), normal(3, 6, 7), normal(5, 7)),
    ),
    "route": Case(
        lambda scores: kernels.route(scores, 2)[1],
        lambda scores: scores.topk(2).values.softmax(-1),
        (normal(B, T, V),),
    ),
    "dispatch": Case(  # the sum of a token's two rows
        lambda x, experts: kernels.combine(
            kernels.dispatch(x, experts, num_experts=V)[0], experts, experts.detach().double() ** 0
        ),
        lambda x, experts: 2 * x,
        (normal(4, 8, H), ints(V, 4, 8, 2)),
    ),
    "combine": Case(
        lambda y, experts, weights: kernels.combine(y, experts, weights),
        lambda y, experts, weights: (y.unflatten(0, (4, 2)) * weights.unsqueeze(-1)).sum(1),
        (normal(8, H), torch.arange(8).view(4, 2), normal(4, 2)),  # the sorted rows are in the tokens' order
    ),
    "router_statistics": Case(
        lambda logits, experts: kernels.router_statistics(logits, experts, layer=1, layers=2),
        lambda logits, experts: torch.stack([torch.zeros(2 * V + 1).double(), statistics(logits, experts)]),
        (normal(B, T, V), ints(V, B, T, 2)),
    ),
    "router_statistics-next": Case(
        lambda logits, experts, sums: kernels.router_statistics(logits, experts, sums),
        lambda logits, experts, sums: sums + statistics(logits, experts),
        (normal(B, V), ints(V, B, 2), normal(1, 2 * V + 1)),
    ),
    "router_statistics-load": Case(
        lambda logits, experts, load: kernels.router_statistics(logits, experts, load=load),
        lambda logits, experts, load: torch.cat(
            [statistics(logits, experts), (load / T * logits.softmax(-1).sum(1)).sum().view(1)]
        ).unsqueeze(0),
        (normal(B, T, V), ints(V, B, T, 2), normal(B, V, seed=1)),
        constants=(2,),
    ),
    "sequence_load": Case(
        lambda experts: kernels.sequence_load(experts, V),
        lambda experts: F.one_hot(experts.long(), V).sum((1, 2)).float(),
        (ints(V, B, T, 2),),
    ),
    "embedding": Case(kernels.embedding, F.embedding, (ints(V, B, T), normal(V, H))),
    "embedding-padding": Case(
        partial(kernels.embedding, padding_idx=-2),
        partial(F.embedding, padding_idx=-2),
        (ints(V, B, T), normal(V, H)),
    ),
    "rms_norm-no-weight": Case(
        lambda x: kernels.rms_norm(x, eps=1e-5), lambda x: F.rms_norm(x, (H,), None, 1e-5), (normal(B, T, H),)
    ),
    "rms_norm": Case(
        partial(kernels.rms_norm, eps=1e-5),
        lambda x, weight: F.rms_norm(x, (H,), weight, 1e-5),
        (normal(B, T, H), normal(H)),
    ),
    "rms_norm-heads": Case(
        partial(kernels.rms_norm, eps=1e-5, head_dim=4),
        lambda x, weight: F.rms_norm(x.unflatten(-1, (4, 4)), (4,), weight, 1e-5).flatten(-2),
        (normal(B, T, 16), normal(4)),
    ),
    "layer_norm": Case(
        kernels.layer_norm, lambda x, *w: F.layer_norm(x, (H,), *w), (normal(B, T, H), normal(H), normal(H, seed=1))
    ),
    "add_rms_norm": Case(
        lambda *t: kernels.add(*kernels.add_rms_norm(*t, eps=1e-5)),
        lambda x, residual, weight: x + residual + F.rms_norm(x + residual, (H,), weight, 1e-5),
        (normal(B, H), normal(B, H, seed=1), normal(H)),
    ),
    "add_layer_norm": Case(
        lambda *t: kernels.add(*kernels.add_layer_norm(*t)),
        lambda x, residual, *w: x + residual + F.layer_norm(x + residual, (H,), *w),
        (normal(B, H), normal(B, H, seed=1), normal(H), normal(H, seed=1)),
    ),
    "rms_norm_rope": Case(
        partial(kernels.rms_norm_rope, eps=1e-5),
        lambda x, weight, *t: rotate(F.rms_norm(x.unflatten(-1, (4, 4)), (4,), weight, 1e-5).flatten(-2), *t),
        (normal(T, 16), normal(4), ANGLE.cos(), ANGLE.sin()),
        (2, 3),
    ),
    "rope-interleaved": Case(
        partial(kernels.rope, interleaved=True), rotate_neighbours, (normal(T, 16), ANGLE.cos(), ANGLE.sin()), (1, 2)
    ),
    "rope": Case(kernels.rope, rotate, (normal(B, T, 16), ANGLE.cos(), ANGLE.sin()), (1, 2)),
    "rope-rows": Case(
        kernels.rope,
        rotate,
        (normal(B, T, 16), *(torch.stack([f(ANGLE * (row + 1)) for row in range(B)]) for f in (torch.cos, torch.sin))),
        (1, 2),
    ),
    "attention": Case(
        partial(kernels.attention, head_dim=2),
        partial(attend, head_dim=2),
        (normal(B, T, 16), normal(B, T, 8), normal(B, T, 8, seed=1)),
    ),
    "swiglu": Case(kernels.swiglu, lambda gate, up: F.silu(gate) * up, (normal(B, T), normal(B, T, seed=1))),
    "geglu": Case(
        partial(kernels.geglu, approximate="tanh"),
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        (normal(B, T), normal(B, T, seed=1)),
    ),
    "gelu": Case(partial(kernels.gelu, approximate="tanh"), partial(F.gelu, approximate="tanh"), (normal(B, T),)),
    "add-repeated": Case(kernels.add, operator.add, (normal(B, T, H), normal(T, H))),
    "add": Case(kernels.add, operator.add, (normal(B, T, H), normal(B, T, H, seed=1))),
    "dropout": Case(partial(kernels.dropout, p=0.25, key=7), drop, (normal(B, T, H),)),
    "dropout-residual": Case(
        lambda x, residual: kernels.dropout(x, 0.25, 7, residual=residual),
        lambda x, residual: drop(x) + residual,
        (normal(B, T, H), normal(B, T, H, seed=1)),
    ),
    **{
        f"cross_entropy-{reduction}": Case(
            partial(kernels.cross_entropy, reduction=reduction),
            partial(torch_cross_entropy, reduction=reduction),
            (normal(B, T, V), TARGET),
            communicates=partial(cross_entropy_collectives, reduction),
        )
        for reduction in ("none", "mean", "sum")
    },
    **{
        f"linear_cross_entropy-{reduction}": Case(
            partial(linear_cross_entropy, reduction=reduction, chunk_tokens=2),
            lambda x, weight, target, reduction=reduction: torch_cross_entropy(
                F.linear(x, weight), target, reduction=reduction
            ),
            (normal(N, 3), normal(V, 3), ints(V, N)),
            communicates=partial(linear_cross_entropy_collectives, reduction),
        )
        for reduction in ("none", "mean")
    },
    "linear_cross_entropy-bias": Case(
        lambda x, weight, bias: linear_cross_entropy(x, weight, ints(V, N), linear_bias=bias, denominator=4.0),
        lambda x, weight, bias: torch_cross_entropy(F.linear(x, weight, bias), ints(V, N), reduction="sum") / 4,
        (normal(N, 3), normal(V, 3), normal(V)),
        communicates=lambda x, weight, bias: ["all-gather"] * bool(weight.shard_order.get(0)),
    ),
    "cross_entropy-weighted-mean": Case(
        partial(kernels.cross_entropy, weight=normal(V).abs(), label_smoothing=0.2),
        partial(torch_cross_entropy, weight=normal(V).abs(), label_smoothing=0.2, reduction="mean"),
        (normal(B, T, V), TARGET),
        communicates=partial(cross_entropy_collectives, "mean"),
    ),
}
