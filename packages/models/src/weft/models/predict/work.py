"""Sizes of an op's work: bytes of tensors, sizes of products, experts, and the pairs of tokens seen by attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..experts import Experts

aten = torch.ops.aten
ATTENTION = ("attention", "plain_attention", "attention_to_received")
# Prefixes of ops that return memory without writing numbers.
UNWRITTEN = ("empty", "new_empty", "resize_", "set_", "_local_scalar_dense", "lift_fresh", "promote_types")


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts, in order. Called for each op: faster than torch's `tree_iter`."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return found
    for each in tree:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (tuple, list, dict)):
            found += tensors_in(each)
    return found


def is_attention(name: str) -> bool:
    """Whether the Weft op of this name computes attention."""
    return name in ATTENTION


def is_view(func: Any, args: Sequence[Any], output: Any) -> bool:
    """Whether an op of torch moves no bytes: the results are views of the arguments, or memory not yet written."""
    if func.__name__.startswith(UNWRITTEN):
        return True
    if func._schema.is_mutable:
        return False
    read = {each.untyped_storage()._cdata for each in tensors_in(args)}
    return all(each.untyped_storage()._cdata in read for each in tensors_in(output))


def count_experts(model: nn.Module) -> int:
    """The number of experts of a model's first mixture; 0 for a model without mixtures."""
    mixtures = (module for module in model.modules() if isinstance(module, Experts))
    return next((next(module.parameters()).shape[0] for module in mixtures), 0)


def product_sizes(func: Any, args: Sequence[Any], num_experts: int = 0) -> list[tuple[int, int, int, int]]:
    """(batch, M, N, K) of each product [batch, M, K] @ [batch, K, N] in an op of torch; [] for an op without products.

    A product of experts counts rows as divided evenly over the experts of all ranks; the true numbers depend on data.
    num_experts: of a layer, on all ranks along "ep" together; 0 where the op has all experts.
    """
    match func:
        case aten.mm.default | aten.mm.dtype | aten.mm.out | aten._scaled_mm.default:
            a, b = args[:2]
            return [(1, a.shape[0], b.shape[1], a.shape[1])]
        case aten.addmm.default | aten.addmm.out | aten.addmm_.default | aten.addmm.dtype:
            _, a, b = args[:3]
            return [(1, a.shape[0], b.shape[1], a.shape[1])]
        case aten.bmm.default | aten.bmm.dtype | aten.bmm.out:
            a, b = args[:2]
            return [(a.shape[0], a.shape[1], b.shape[2], a.shape[2])]
        case aten.baddbmm.default | aten.baddbmm_.default:
            _, a, b = args[:3]
            return [(a.shape[0], a.shape[1], b.shape[2], a.shape[2])]
    name = func.__name__.partition(".")[0]
    if name == "_grouped_mm":
        a, b = args[:2]
        return [(1, a.shape[-2], b.shape[-1], a.shape[-1])]
    if func.namespace == "weft" and name in ("experts", "experts_backward"):
        count = name.count("_backward") + 1
        gate = args[4 + count - 1]
        E, inner, width = gate.shape
        choices = args[10] if count == 1 else len(args[8])  # `size` of forward; rows of backward's `z_gate`
        rows = -(-choices // (num_experts or E))
        forward = [(E, rows, inner, width)] * 2 + [(E, rows, width, inner)]
        return forward if count == 1 else forward + [(E, inner, width, rows)] * 2 + [(E, width, inner, rows)]
    return []


def attention_sizes(
    operands: Sequence[Any], options: Mapping[str, Any]
) -> tuple[tuple[int, int, int, int, int, int], int]:
    """The sizes (batch, heads, kv_heads, T, S, head_dim) of a call of attention, and how many keys all queries see.

    operands: query [..., T, heads * D] and key [..., S, kv_heads * D] first. options: of the op.
    The second number is the sum over rows, for a single head. Documents are unknown on shapes, so every earlier token
    in the window counts as seen.
    """
    query, key = operands[:2]
    head_dim = options.get("head_dim") or query.shape[-1]
    T, S = query.shape[-2], key.shape[-2]
    batch = math.prod(query.shape[:-2])
    sizes = (batch, query.shape[-1] // head_dim, key.shape[-1] // head_dim, T, S, head_dim)
    if not options.get("causal", True):
        return sizes, batch * T * S
    runs = options.get("queries") or options.get("order")
    if runs is None:
        first = options.get("first")
        first = S - T if first is None else first
        runs = ((first, first + T),)
    window = options.get("window") or S
    return sizes, batch * sum(_count_keys(stop, window) - _count_keys(start, window) for start, stop in runs)


def _count_keys(stop: int, window: int) -> int:
    """The keys seen by all queries of the tokens 0 to stop - 1 together, each of `window` keys at most."""
    ramp = min(stop, window)
    return ramp * (ramp + 1) // 2 + max(0, stop - window) * window
