"""Sequence parallelism whose gathers and reductions travel in steps, beside the products, where that was measured faster.

A reduction is of any row-parallel layer without a bias, a gather of one that shares its input with no other: for several products
one gather brings less than a gather for each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft import kernels
from weft.kernels.backend import is_compiling
from weft.kernels.matmul.sharded.choice import MEASURED, Form, faster_in_steps
from weft.kernels.sharded import cast_for
from weft.reshard import layout_of

from ..layers import Linear
from .plan import ParallelPlan
from .styles import TENSOR_AXIS, TOKENS_DIM


def may_travel(layer: nn.Module, plan: ParallelPlan) -> bool:
    """Whether a layer's product is ever computed so. Not where a block is recomputed but for what it communicates."""
    alone = type(layer) is Linear and layer.bias is None and "forward" not in vars(layer)
    return bool(MEASURED) and plan.sequence and plan.recompute != "selective" and alone


def gather_columns(layer: nn.Module) -> None:
    """Has a column-parallel layer gather the tokens that `is_left` leaves where they are."""
    layer.forward = partial(_columns, layer)


def reduce_rows(layer: nn.Module) -> None:
    """Has a row-parallel layer scatter its output over the tokens."""
    layer.forward = partial(_rows, layer)


def is_left(layer: Any, input: Tensor) -> bool:
    """Whether the tokens of a column-parallel layer's input are left where they are, for its product to gather."""
    return _is_faster("all_gather_matmul", layer, input, (TENSOR_AXIS,))


def _columns(layer: Any, input: Tensor) -> Tensor:
    if _lies(input, (TENSOR_AXIS,)):
        return kernels.all_gather_matmul(input, layer.weight.mT)
    return kernels.linear(input, layer.weight)


def _rows(layer: Any, input: Tensor) -> Tensor:
    input = cast_for("linear", input)
    if _is_faster("matmul_reduce_scatter", layer, input, ()):
        return kernels.matmul_reduce_scatter(input, layer.weight.mT, dim=TOKENS_DIM)
    return kernels.linear(input, layer.weight)


def _is_faster(form: Form, layer: Any, input: Any, cut: tuple[str, ...]) -> bool:
    """cut: the axes that the tokens lie on. An adapter's output goes with the layer's own, and is reduced with it."""
    lone = not hasattr(layer, "lora") and _lies(input, cut)
    return lone and faster_in_steps(form, input, layer.weight, TENSOR_AXIS)


def _lies(input: Any, cut: tuple[str, ...]) -> bool:
    """Whether the tokens of [B, T, H] are cut over those axes; False where it is compiled, for a graph has the pair."""
    if is_compiling() or not isinstance(input, DTensor) or input.ndim != 3:
        return False
    return layout_of(input).shard_order.get(TOKENS_DIM, ()) == cut
