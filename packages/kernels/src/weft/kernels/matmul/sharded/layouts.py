"""What the rules of products share: bias and residual that are added once, and activations of sums that are complete."""

from __future__ import annotations

from string import ascii_lowercase

from weft.mesh import Layout, LayoutError, Partial, infer

GRADIENT = "the output's gradient"  # in messages


def rows_by_weight(op: str, input: Layout, weight: Layout, dims: int, weight_name: str = "weight") -> Layout:
    """The output of an input of so many dims times a weight [M, K] transposed. op, weight_name: in messages."""
    lead = ascii_lowercase[: dims - 1]
    return infer.einsum(f"{lead}z,yz->{lead}y", input, weight, name=op, operands=("input", weight_name))


def of_rows_and_weight(
    op: str, grad: Layout, input: Layout, weight: Layout, dims: int, weight_name: str = "weight"
) -> tuple[Layout, Layout]:
    """The gradients of input and weight of `rows_by_weight`, from the output's."""
    lead, name = ascii_lowercase[: dims - 1], f"{op}, backward"
    return (
        infer.einsum(f"{lead}y,yz->{lead}z", grad, weight, name=name, operands=(GRADIENT, weight_name)),
        infer.einsum(f"{lead}y,{lead}z->yz", grad, input, name=name, operands=(GRADIENT, "input")),
    )


def summed_axes(layout: Layout) -> dict[str, str]:
    """The axes over which the ranks' parts are added up or averaged, each with what a whole tensor is there."""
    return {
        axis: "R"
        for axis, placement in zip(layout.mesh.axis_names, layout.placements, strict=True)
        if isinstance(placement, Partial)
    }


def whole(layout: Layout) -> Layout:
    """The layout when all is added up."""
    return layout.replace(**summed_axes(layout))


def kept(layout: Layout, dims: str, of: str) -> Layout:
    """How a tensor with the dims `of` lies beside one with `dims` that lies so: cut where that is cut, else whole."""
    return whole(infer.einsum(f"{dims}->{of}", whole(layout)))


def check_operand(op: str, name: str, layout: Layout | None, wanted: Layout, output: Layout) -> None:
    """Raises LayoutError where an operand beside the factors does not lie as `wanted`."""
    if layout is not None and layout != wanted:
        raise LayoutError(
            f"{op} gives its output as ({output}) and has a {name} ({layout}); reshard the {name} to ({wanted})",
            (wanted,),
        )


def check_residual_layout(
    op: str, residual: Layout, shape: tuple[int, ...], complete: Layout, of_output: tuple[int, ...], output: Layout
) -> None:
    """Raises LayoutError where a residual does not lie as the output when all is added up: `complete`, of the shape of_output."""
    if shape == of_output:
        check_operand(op, "residual", residual, complete, output)
    else:
        of = ("the output", "the residual")
        infer.elementwise(op, True, complete, residual, shapes=(of_output, shape), operands=of)


def check_activation(op: str, activation: str | None, output: Layout) -> None:
    """Raises LayoutError for an activation of addends."""
    if activation is not None and summed_axes(output):
        raise LayoutError(
            f"{op}: {activation} of an output that is ({output}) would be of addends, and not of their sum; call {op} "
            f"without it, reshard the output to ({whole(output)}), and apply {activation} there"
        )


def adds(output: Layout, rank: int) -> bool:
    """Whether this rank adds what is added once: on axes of a sum the first coordinate alone; every part of an average."""
    coordinate = output.mesh.coordinate(rank) or {}
    return not any(coordinate[axis] for axis in output.mesh.axis_names if output[axis] == Partial("sum"))
