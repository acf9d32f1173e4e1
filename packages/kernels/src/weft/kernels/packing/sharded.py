"""pack and unpack on plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from weft.mesh import Layout, LayoutError, infer

from ..dispatch.op import Op
from ..dispatch.sharded import Shapes, Sharding, apply, apply_many, independent
from . import reference


def pack(*tensors: Tensor, parts: int) -> Tensor:
    """Packs tensors of different widths into a single tensor, whose reshard moves all of them by one collective.

    tensors: each [..., W], where `parts` divides W.
    Returns [..., parts, sum of W / parts]. Part p of the output holds part p of every tensor, side by side: a rank with
    part p of the output has part p of every tensor.

    Layouts: the same for all tensors, Partial(sum) included. The number of shards of the last dim must divide
    `parts`. The output has the same layout, with `parts` sharded in place of the last dim.
    Communication: none.
    Raises ValueError for mismatched shapes, LayoutError for other layouts.
    """
    lead = tensors[0].shape[:-1]
    if any(x.shape[:-1] != lead or x.shape[-1] % parts for x in tensors):
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(f"pack takes tensors of one shape but for the last dim, a multiple of {parts}, got {shapes}")
    return apply(PACK, *tensors, widths=tuple([int(x.shape[-1]) // parts for x in tensors]))


def unpack(packed: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """The tensors, each [..., parts * width], from which `pack` made `packed`.

    packed: [..., parts, sum of widths], from `pack`.
    widths: for each tensor, the width of one part.

    Layouts: any with the last dim replicated and `parts` sharded evenly, Partial(sum) included; each tensor has the
    layout of `packed`, with its last dim sharded in place of `parts`.
    Communication: none.
    Raises ValueError for widths of another sum, LayoutError for other layouts.
    """
    if sum(widths) != packed.shape[-1]:
        raise ValueError(f"unpack: the widths {tuple(widths)} are not those of {tuple(packed.shape)}")
    return apply_many(UNPACK, packed, widths=tuple(widths))


def _pack_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    given = [layout for layout in layouts if layout is not None]
    shape = shapes[0]
    assert shape is not None and len(given) == len(layouts), "pack takes no None"
    output = infer.elementwise("pack", True, *given)
    widths = options["widths"]
    parts, ways = shape[-1] // widths[0], output.parts(len(shape) - 1)
    if parts % ways:
        raise LayoutError(f"pack: {parts} parts cannot be cut in {ways}, as the tensors' last dim is; give a multiple")
    return Sharding(output, (*shape[:-1], parts, sum(widths)), independent(output, layouts))


def _unpack_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    (packed,), (shape,) = layouts, shapes
    assert packed is not None and shape is not None, "apply_many passes the packed tensor"
    *lead, parts, _ = shape
    ways = packed.parts(len(shape) - 2)
    if packed.parts(len(shape) - 1) > 1 or parts % ways:
        raise LayoutError(
            f"unpack takes {parts} whole parts cut evenly, got {shape} as ({packed}); pack the tensors for this layout"
        )
    layout = infer.elementwise("unpack", True, packed)
    first, *more_shapes = ((*lead, parts * width) for width in options["widths"])

    def gradients(*grads: Layout | None) -> tuple[Layout | None, ...]:
        found = {grad for grad in grads if grad is not None}
        if len(found) > 1:
            raise LayoutError(
                f"unpack: the gradients arrive as {' and '.join(f'({each})' for each in found)}; reshard one"
            )
        return (infer.gradient(layout, found.pop(), packed, [packed]),)

    return Sharding(layout, first, gradients, more=tuple([(layout, each) for each in more_shapes]))


PACK = Op("pack", reference.pack, reference.pack_backward, _pack_rule)
UNPACK = Op("unpack", reference.unpack, reference.unpack_backward, _unpack_rule)
