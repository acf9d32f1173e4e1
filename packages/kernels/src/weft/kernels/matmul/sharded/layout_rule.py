"""Layout rules shared by products: of the product, bias, residual and activation; and the output's dtype."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

import torch
from weft.mesh import Layout, LayoutError, Partial, infer

GRADIENT = "the output's gradient"  # an operand's name in messages


def linear_output(op: str, input: Layout, weight: Layout, dims: int, weight_name: str = "weight") -> Layout:
    """The output's layout of input @ weight.T. dims: the input's number of dims. op, weight_name: for messages."""
    leading = ascii_lowercase[: dims - 1]
    return infer.einsum(f"{leading}z,yz->{leading}y", input, weight, name=op, operands=("input", weight_name))


def linear_gradients(
    op: str, grad: Layout, input: Layout, weight: Layout, dims: int, weight_name: str = "weight"
) -> tuple[Layout, Layout]:
    """The layouts of the gradients of input and weight of `linear_output`, from the layout of the output's gradient."""
    leading, name = ascii_lowercase[: dims - 1], f"{op}, backward"
    return (
        infer.einsum(f"{leading}y,yz->{leading}z", grad, weight, name=name, operands=(GRADIENT, weight_name)),
        infer.einsum(f"{leading}y,{leading}z->yz", grad, input, name=name, operands=(GRADIENT, "input")),
    )


def summed_axes(layout: Layout) -> dict[str, str]:
    """{axis: "R"} for each axis with a Partial placement: `Layout.replace` with these makes the layout complete."""
    return {
        axis: "R"
        for axis, placement in zip(layout.mesh.axis_names, layout.placements, strict=True)
        if isinstance(placement, Partial)
    }


def without_partial(layout: Layout) -> Layout:
    """The layout after all Partial axes are reduced: Replicate in place of Partial."""
    return layout.replace(**summed_axes(layout))


def layout_of_dims(layout: Layout, dims: str, of: str) -> Layout:
    """The layout of an operand with a part of a tensor's dims: sharded as the tensor on these dims, else replicated.

    layout: of the tensor. dims: a letter for each dim of the tensor. of: the letters of the operand's dims.
    """
    return without_partial(infer.einsum(f"{dims}->{of}", without_partial(layout)))


def check_operand(op: str, name: str, layout: Layout | None, wanted: Layout, output: Layout) -> None:
    """Raises LayoutError unless the layout of an operand (name, as "bias") is `wanted`, or None for no operand.

    output: the output's layout, for the message.
    """
    if layout is not None and layout != wanted:
        raise LayoutError(
            f"{op} gives its output as ({output}) and has a {name} ({layout}); reshard the {name} to ({wanted})",
            (wanted,),
        )


def check_residual_layout(
    op: str, residual: Layout, shape: tuple[int, ...], complete: Layout, output_shape: tuple[int, ...], output: Layout
) -> None:
    """Raises LayoutError unless the residual has the layout `complete`: the output's, with Replicate for Partial.

    A residual of a smaller shape, which broadcasts to shape output_shape, is sharded alike on the dims which it has.
    """
    if shape == output_shape:
        check_operand(op, "residual", residual, complete, output)
    else:
        names = ("the output", "the residual")
        infer.elementwise(op, True, complete, residual, shapes=(output_shape, shape), operands=names)


def check_activation(op: str, activation: str | None, output: Layout) -> None:
    """Raises LayoutError for an activation of a Partial output, whose ranks hold addends."""
    if activation is not None and summed_axes(output):
        raise LayoutError(
            f"{op}: the output is ({output}), and {activation} needs the sum, not its addends; call {op} without an "
            f"activation, reshard the output to ({without_partial(output)}), and apply {activation} there"
        )


def output_dtype(dtype: torch.dtype, options: dict[str, Any]) -> torch.dtype:
    """The output's dtype, for `Op.dtype`. dtype: of a."""
    wanted: torch.dtype | None = options["out_dtype"]
    return wanted or dtype


def adds_bias(output: Layout, rank: int) -> bool:
    """Whether this rank adds bias and residual to the local output. The complete output must have both once.

    On Partial(sum) axes only coordinate 0 adds both; on Partial(avg) axes every rank does.
    """
    coordinate = output.mesh.coordinate(rank) or {}
    return not any(coordinate[axis] for axis in output.mesh.axis_names if output[axis] == Partial("sum"))
