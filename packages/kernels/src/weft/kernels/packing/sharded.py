"""pack and unpack on plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from weft.mesh import Layout, LayoutError, infer

from ..op import Op
from ..sharded import Shapes, Sharding, apply, apply_many, independent
from . import reference


def pack(*tensors: Tensor, parts: int) -> Tensor:
    """Tensors of different widths as one, so that a reshard of it moves all of them by one collective.

    tensors: [..., W] each, the widths multiples of `parts`. Returns [..., parts, sum of the widths / parts]: part p of all of
    them side by side, so that whoever has it has part p of each.
    Layouts: one for all, Partial(sum) included, the last dim cut so that `parts` is a multiple; the output lies the same, its
    parts cut where the widths are. Communication: none.
    Raises ValueError for shapes that do not fit, LayoutError for other layouts.
    """
    lead = tensors[0].shape[:-1]
    if any(x.shape[:-1] != lead or x.shape[-1] % parts for x in tensors):
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(f"pack takes tensors of one shape but for the last dim, a multiple of {parts}, got {shapes}")
    return apply(PACK, *tensors, widths=tuple([int(x.shape[-1]) // parts for x in tensors]))


def unpack(packed: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """The tensors [..., parts * width] of which `pack` made `packed`. widths: of one part of each.

    Layouts: any; the tensors lie as `packed`, Partial(sum) included. Communication: none.
    Raises ValueError for widths that are not those of `packed`.
    """
    if sum(widths) != packed.shape[-1]:
        raise ValueError(f"unpack: the widths {tuple(widths)} are not those of {tuple(packed.shape)}")
    return apply_many(UNPACK, packed, widths=tuple(widths))


def _pack_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    given = [layout for layout in layouts if layout is not None]
    shape = shapes[0]
    assert shape is not None and len(given) == len(layouts), "all are given"
    output = infer.elementwise("pack", True, *given)
    widths = options["widths"]
    parts, ways = shape[-1] // widths[0], output.parts(len(shape) - 1)
    if parts % ways:
        raise LayoutError(f"pack: {parts} parts cannot be cut in {ways}, as the tensors' last dim is; give a multiple")
    return Sharding(output, (*shape[:-1], parts, sum(widths)), independent(output, layouts))


def _unpack_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    (packed,), (shape,) = layouts, shapes
    assert packed is not None and shape is not None, "it is given"
    *lead, parts, _ = shape
    ways = packed.parts(len(shape) - 2)
    if packed.parts(len(shape) - 1) > 1 or parts % ways:
        raise LayoutError(
            f"unpack takes {parts} whole parts cut evenly, got {shape} as ({packed}); pack it for that layout"
        )
    layout = infer.elementwise("unpack", True, packed)
    first, *others = ((*lead, parts * width) for width in options["widths"])

    def gradients(*grads: Layout | None) -> tuple[Layout | None, ...]:
        found = {grad for grad in grads if grad is not None}
        if len(found) > 1:
            raise LayoutError(
                f"unpack: the gradients lie as {' and '.join(f'({each})' for each in found)}; reshard one"
            )
        return (infer.gradient(layout, found.pop(), packed, [packed]),)

    return Sharding(layout, first, gradients, more=tuple([(layout, each) for each in others]))


PACK = Op("pack", reference.pack, reference.pack_backward, _pack_rule)
UNPACK = Op("unpack", reference.unpack, reference.unpack_backward, _unpack_rule)
