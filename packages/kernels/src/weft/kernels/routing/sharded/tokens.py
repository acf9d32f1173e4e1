"""`dispatch` and `combine` on plain tensors and DTensors, and `sort_by_expert` on plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, Partial, Placement, Replicate, Shard, infer

from ...dispatch.arguments import described, is_int
from ...dispatch.backend import TOKEN_DTYPES, check_floats
from ...dispatch.op import Op
from ...dispatch.sharded import Shapes, Sharding, apply, apply_many, autocasts, check_operands
from .. import function

GRADIENT = "the output's gradient"  # an operand's name in messages


@autocasts("dispatch")
def dispatch(x: Tensor, experts: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    """Each token's row once for each of its experts, sorted by expert: the input of `grouped_matmul`.

    x: [..., H]. experts: [..., k] of int32 or int64, from `route`; N is the number of tokens.
    Returns the rows [N * k, H], in the order of the tokens within an expert, and the end of each expert's rows, int32
    [num_experts].
    Gradient: of x, for each token the sum of the rows' gradients, in float32, in the order of the token's choices.
    Saved for backward: the row number of each choice, 4 bytes, and the experts.

    Layouts: x and the experts are sharded on the same dims of tokens, evenly; each rank sorts its own tokens. Rows and
    ends are sharded on dim 0 by the same axes: the ends are [shards * num_experts], and count the rows of their own
    shard. Where x is sharded on H or Partial(sum), the rows are too.
    Communication: none.
    Raises LayoutError for any other layouts; ValueError for mismatched shapes, other dtypes, tensors on two devices,
    and on a CPU for an expert outside 0 to num_experts - 1, whose rows a GPU puts behind all rows.
    """
    check_operands("dispatch", ("x", "experts"), 2, x, experts)
    check_floats("dispatch", ("x",), x)
    check_experts("dispatch", experts)
    if x.ndim < 1 or x.shape[:-1] != experts.shape[:-1]:
        raise ValueError(
            f"dispatch takes x [..., H] and experts [..., k] of the same tokens, got {tuple(x.shape)} and "
            f"{tuple(experts.shape)}; reshape one"
        )
    check_num_experts("dispatch", num_experts)
    rows, offsets = apply_many(DISPATCH, x, experts, num_experts=num_experts)
    return rows, offsets


@autocasts("combine")
def combine(y: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Each token's sum of the rows of the token's experts, times their weights: tokens' rows back from `dispatch`.

    y: [N * k, H], rows in the order of `dispatch` for the same experts.
    experts: [..., k] of int32 or int64. weights: [..., k], floating.
    Returns [..., H] in the dtype of y. A token's rows are added in the order of the token's choices, in float32 at
    least, without atomics: every run gives the same bits.
    Gradients: of y, the output's gradient times the weight; of the weights, dot products of rows. Saved for backward:
    y, the weights, and the row number of each choice, 4 bytes.

    Layouts: experts and weights are sharded on the same dims of tokens, evenly; y is sharded on dim 0 by the same
    axes, as the rows of `dispatch`, and may be sharded on H or Partial(sum). The output is sharded as the tokens.
    Communication: none.
    Raises LayoutError for any other layouts; ValueError for mismatched shapes, other dtypes and tensors on two
    devices.
    """
    check_operands("combine", ("y", "experts", "weights"), 3, y, experts, weights)
    check_floats("combine", ("y", "the weights"), y, weights)
    check_experts("combine", experts)
    if y.ndim != 2 or weights.shape != experts.shape or y.shape[0] != experts.numel():
        raise ValueError(
            f"combine takes y [N * k, H] and experts and weights [..., k] of N tokens, got {tuple(y.shape)}, "
            f"{tuple(experts.shape)} and {tuple(weights.shape)}; give the rows of dispatch, and route's outputs"
        )
    return apply(COMBINE, y, experts, weights)


def sort_by_expert(experts: Tensor, num_experts: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """The order of token choices sorted by expert: a stable counting sort, without waiting for the device.

    experts: [..., k] of int32 or int64, a plain tensor.
    Returns source, int32 [N * k], token * k + choice of each sorted row; and offsets, int32 [num_experts], the end of
    the rows of each expert of first to first + num_experts - 1. Choices of other experts are the last rows, in the
    order of the tokens.
    Communication: none. Raises ValueError for a DTensor, whose shards would have to be sorted together, and for further
    dtypes.
    """
    check_experts("sort_by_expert", experts)
    if isinstance(experts, DTensor):
        raise ValueError("sort_by_expert takes plain tensors, got a DTensor; give the rank's part, experts.to_local()")
    check_num_experts("sort_by_expert", num_experts)
    source, _, offsets = function.sort_rows(experts, num_experts, first)
    return source, offsets


def check_num_experts(op: str, num_experts: int) -> None:
    """Raise ValueError unless the number of experts is an int of 1 or more."""
    if not (is_int(num_experts) and num_experts >= 1):
        raise ValueError(f"{op}: num_experts is {described(num_experts)}; give the number of experts, 1 or more")


def check_experts(name: str, experts: Tensor) -> None:
    """Raise ValueError unless the experts are ints of shape [..., k]. name: of the op."""
    if experts.dtype not in TOKEN_DTYPES:
        raise ValueError(f"{name} takes int experts, got {experts.dtype}; give the experts of route, or cast them")
    if experts.ndim < 1 or experts.shape[-1] < 1:
        raise ValueError(
            f"{name} takes experts of shape [..., k] with k of 1 or more, got {tuple(experts.shape)}; give the experts "
            f"of route"
        )


def _dispatch_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `DISPATCH`. layouts, shapes: of x and the experts."""
    x, experts = layouts
    x_shape, shape = shapes
    assert x is not None and experts is not None and x_shape and shape, "both are given"
    tokens = len(shape) - 1
    infer.whole("dispatch", "the experts", experts, tokens)
    lead = ascii_lowercase[:tokens]
    # [..., k, H]
    by_choice = infer.einsum(f"{lead}z,{lead}y->{lead}yz", x, experts, name="dispatch", operands=("x", "the experts"))
    rows = _rows_layout("dispatch", by_choice, shape[:-1])
    shards = rows.parts(0)
    ends = Layout.in_order(rows.mesh, {axis: Shard(0) for axis in rows.shard_order.get(0, ())})
    num_rows, num_experts = prod(shape), options["num_experts"]

    def gradient_layouts(grad: Layout, of_offsets: None) -> tuple[Layout | None, ...]:
        of_choices = _layout_by_choice("dispatch, backward", GRADIENT, grad, experts, tokens)
        return infer.einsum(
            f"{lead}yz,{lead}y->{lead}z",
            of_choices,
            experts,
            name="dispatch, backward",
            operands=(GRADIENT, "the experts"),
        ), None

    return Sharding(rows, (num_rows, x_shape[-1]), gradient_layouts, further_outputs=((ends, (shards * num_experts,)),))


def _combine_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `COMBINE`. layouts, shapes: of y, the experts and the weights."""
    y, experts, weights = layouts
    y_shape, shape, _ = shapes
    assert y is not None and experts is not None and weights is not None and y_shape and shape, "all are given"
    tokens = len(shape) - 1
    infer.whole("combine", "the experts", experts, tokens)
    infer.elementwise("combine", False, experts, weights, operands=("the experts", "the weights"))
    lead = ascii_lowercase[:tokens]
    of_choices = _layout_by_choice("combine", "y", y, experts, tokens)
    _rows_layout("combine", of_choices, shape[:-1])  # refuses uneven shards
    output = infer.einsum(
        f"{lead}yz,{lead}y->{lead}z", of_choices, weights, name="combine", operands=("y", "the weights")
    )

    def gradient_layouts(grad: Layout) -> tuple[Layout | None, ...]:
        name = "combine, backward"
        dy = infer.einsum(f"{lead}z,{lead}y->{lead}yz", grad, weights, name=name, operands=(GRADIENT, "the weights"))
        dweights = infer.einsum(f"{lead}z,{lead}yz->{lead}y", grad, of_choices, name=name, operands=(GRADIENT, "y"))
        return _rows_layout(name, dy, shape[:-1]), None, dweights

    return Sharding(output, (*shape[:-1], y_shape[-1]), gradient_layouts)


def _rows_layout(name: str, by_choice: Layout, tokens: Sequence[int]) -> Layout:
    """The layout of rows [N * k, H] which each rank sorts within the rank's shard of tokens.

    by_choice: the layout of the unsorted rows [..., k, H]. tokens: the sizes of the leading dims.
    Raises LayoutError for an uneven shard of a leading dim, because dim 0 would be sharded differently.
    """
    placements: dict[str, Placement] = {}
    for dim, axes in sorted(by_choice.shard_order.items()):
        if dim < len(tokens):
            placements |= dict.fromkeys(axes, Shard(0))
            if tokens[dim] % by_choice.parts(dim):
                raise LayoutError(
                    f"{name}: dim {dim} of size {tokens[dim]} cannot be split evenly over "
                    f"{' x '.join(map(repr, axes))} of size {by_choice.parts(dim)}; pad it, or replicate it over them"
                )
        else:
            placements |= dict.fromkeys(axes, Shard(1))
    return Layout.in_order(by_choice.mesh, placements | _unsharded(by_choice, placements))


def _layout_by_choice(name: str, what: str, rows: Layout, experts: Layout, tokens: int) -> Layout:
    """The layout of unsorted rows [..., k, H], from the layout `rows` of sorted rows: the inverse of `_rows_layout`.

    name, what: the op's and the rows' names in messages. experts: the layout of [..., k]. tokens: the number of
    leading dims. Raises LayoutError if dim 0 is not sharded by the axes which shard tokens, in the same order.
    """
    placements: dict[str, Placement] = {}
    for _, axes in sorted(experts.shard_order.items()):
        placements |= {axis: experts[axis] for axis in axes}
    across = {axis: Shard(tokens + 1) for axis in rows.shard_order.get(1, ()) if axis not in placements}
    if rows.shard_order.get(0, ()) != tuple(placements):
        wanted = Layout.in_order(
            rows.mesh,
            dict.fromkeys(placements, Shard(0))
            | {axis: Shard(1) for axis in across}
            | _unsharded(rows, {**placements, **across}),
        )
        raise LayoutError(
            f"{name}: {what} is ({rows}) and the experts are ({experts}), but each rank has the rows of its tokens; "
            f"reshard {what} to ({wanted})",
            (wanted,),
        )
    return Layout.in_order(rows.mesh, placements | across | _unsharded(rows, placements | across))


def _unsharded(layout: Layout, placements: dict[str, Placement]) -> dict[str, Placement]:
    """Placements for the axes of `layout` which are not in `placements`: Partial as in `layout`, else Replicate."""
    return {
        axis: placement if isinstance(placement := layout[axis], Partial) else Replicate()
        for axis in layout.mesh.axis_names
        if axis not in placements
    }


DISPATCH = Op(
    "dispatch",
    function.dispatch,
    function.dispatch_backward,
    _dispatch_rule,
    lambda dtype, options: (dtype, torch.int32),
    num_constants=lambda options: 1,
)
COMBINE = Op("combine", function.combine, function.combine_backward, _combine_rule)
