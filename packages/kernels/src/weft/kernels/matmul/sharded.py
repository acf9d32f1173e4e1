"""linear on plain tensors and DTensors."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, LayoutError, Partial, infer

from ..op import Op
from ..sharded import Shapes, Sharding, apply, autocasts
from . import reference


@autocasts("linear")
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`input @ weight.T + bias`.

    input: [..., K]. weight: [M, K]. bias: [M]. Returns [..., M].
    Layouts: as of the einsum "...k,mk->...m": a weight sharded on M shards the output (column parallel), an input and
    a weight sharded on K leave it Partial(sum) (row parallel); the bias is then added at one coordinate alone.
    Communication: none. Raises LayoutError for any other layouts.
    """
    _check(input, weight, bias)
    return apply(LINEAR, input, weight, bias)


def _check(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 2 or input.ndim < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear takes input [..., K] and weight [M, K], got {tuple(input.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear takes a bias of shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    input, weight, bias = layouts
    input_shape, weight_shape, _ = shapes
    assert input is not None and weight is not None and input_shape and weight_shape, "both are given"
    lead = ascii_lowercase[: len(input_shape) - 1]
    output = infer.einsum(f"{lead}z,yz->{lead}y", input, weight)
    if bias is not None:
        wanted = infer.einsum("yz,->y", weight.replace(**_partial_axes(output)), Layout(output.mesh))
        if bias != wanted:
            raise LayoutError(
                f"linear gives its output as ({output}) and has a bias ({bias}); reshard the bias to ({wanted})"
            )

    def gradients(grad: Layout) -> tuple[Layout | None, ...]:
        return (
            infer.einsum(f"{lead}y,yz->{lead}z", grad, weight),
            infer.einsum(f"{lead}y,{lead}z->yz", grad, input),
            None if bias is None else infer.einsum(f"{lead}y->y", grad),
        )

    def local(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        coordinate = output.mesh.coordinate(rank) or {}
        return {"add_bias": not any(coordinate[axis] for axis in _partial_axes(output))}

    return Sharding(output, (*input_shape[:-1], weight_shape[0]), gradients, local)


def _partial_axes(layout: Layout) -> dict[str, str]:
    return {
        axis: "R"
        for axis, placement in zip(layout.mesh.axis_names, layout.placements, strict=True)
        if isinstance(placement, Partial)
    }


LINEAR = Op("linear", reference.forward, reference.backward, _rule, weights=(1, 2))
