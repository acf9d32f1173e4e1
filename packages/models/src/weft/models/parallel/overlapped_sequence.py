"""Sequence parallelism with all-gathers and reduce-scatters in steps, overlapped with matrix products.

The overlapped form is used for sizes at which it was measured faster. A reduce-scatter may run in steps after any
row-parallel layer without a bias. An all-gather may run in steps before a column-parallel layer whose input no
sibling shares: for several products, a common all-gather moves less than an all-gather each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft import kernels
from weft.kernels.extension import MEASURED, OverlappedOp, cast_for, faster_in_steps
from weft.reshard import layout_of, reshard
from weft.reshard.extension import is_compiling

from ..layers import Head, Linear
from ..low_rank import has_active_adapter
from .plan import ParallelPlan
from .styles import TENSOR_AXIS, TOKENS_DIM


def may_run_in_steps(layer: nn.Module, plan: ParallelPlan) -> bool:
    """Whether the plan lets this layer's product run in steps, at any size.

    Not with recompute="selective", which computes blocks again without their communication.
    """
    if plan.exact is not None:  # each coordinate of the named mesh computes whole products
        return False
    alone = type(layer) in (Linear, Head) and layer.bias is None and "forward" not in vars(layer)
    return bool(MEASURED) and plan.sequence and plan.recompute != "selective" and alone


def gather_columns(layer: nn.Module) -> None:
    """Make a column-parallel layer all-gather tokens within the product, for sizes measured faster."""
    layer.forward = partial(_columns, layer)


def reduce_rows(layer: nn.Module) -> None:
    """Make a row-parallel layer reduce-scatter tokens within the product, for sizes measured faster."""
    layer.forward = partial(_rows, layer)


def gathers_in_product(layer: Any, input: Tensor) -> bool:
    """Whether a column-parallel layer gathers this input within the product; the input stays sharded until then."""
    return _is_faster("all_gather_matmul", layer, input, (TENSOR_AXIS,))


def _columns(layer: Any, input: Tensor, targets: Tensor | None = None) -> Tensor:
    if targets is not None:  # the losses need all tokens before the product
        return layer.losses(_with_all_tokens(input), targets)  # type: ignore[no-any-return]
    if _tokens_over(input, (TENSOR_AXIS,)):
        return kernels.all_gather_matmul(input, layer.weight.mT)
    return kernels.linear(input, layer.weight)


def _with_all_tokens(input: Tensor) -> Tensor:
    """The input, all-gathered over the tensor axis where `gathers_in_product` left the tokens sharded."""
    if not isinstance(input, DTensor) or not _tokens_over(input, (TENSOR_AXIS,)):
        return input
    return reshard(input, placements=layout_of(input).replace(**{TENSOR_AXIS: "R"}))


def _rows(layer: Any, input: Tensor) -> Tensor:
    input = cast_for("linear", input)
    if _is_faster("matmul_reduce_scatter", layer, input, ()):
        return kernels.matmul_reduce_scatter(input, layer.weight.mT, dim=TOKENS_DIM)
    return kernels.linear(input, layer.weight)


def _is_faster(form: OverlappedOp, layer: Any, input: Any, axes: tuple[str, ...]) -> bool:
    """Whether this product was measured faster in steps. axes: over which the form needs the tokens sharded.

    False for a layer with an adapter: the adapter's output is added to the layer's before both are reduced at once.
    """
    eligible = not has_active_adapter(layer) and _tokens_over(input, axes)
    return eligible and faster_in_steps(form, input, layer.weight, TENSOR_AXIS)


def _tokens_over(input: Any, axes: tuple[str, ...]) -> bool:
    """Whether the tokens of an input [B, T, H] are sharded over exactly these axes.

    False under torch.compile: a graph uses the separate collective and product.
    """
    if is_compiling() or not isinstance(input, DTensor) or input.ndim != 3:
        return False
    return layout_of(input).shard_order.get(TOKENS_DIM, ()) == axes
