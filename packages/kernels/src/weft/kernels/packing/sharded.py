"""pack and unpack on plain tensors and DTensors: to reshard several tensors by one collective.

Context parallelism packs keys and values (for Ulysses also queries), reshards the packed tensor from tokens to heads or
to all tokens, and unpacks it. pack and unpack are inverses, and each is the backward of the other. Local computation is
plain torch on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from weft.mesh import Layout, LayoutError, infer

from ..dispatch.arguments import check_tensors, described, is_int
from ..dispatch.op import Op, Tensors
from ..dispatch.sharded import Shapes, Sharding, apply, apply_many, infer_gradient_layouts


def pack(*tensors: Tensor, parts: int) -> Tensor:
    """Packs tensors of different widths W into a single tensor, whose reshard moves all of them by one collective.

    tensors: each [..., W]. parts: the number of parts of each last dim; divides every W.
    Returns [..., parts, sum of W / parts]. Part p of the output holds part p of every tensor, side by side: a rank with
    part p of the output has part p of every tensor.

    Layouts: the same for all tensors, Partial(sum) included. The number of shards of the last dim must divide
    `parts`. The output has the same layout, with `parts` sharded in place of the last dim.
    Communication: none.
    Raises ValueError for no tensors, a last dim of size 0, mismatched shapes and parts that are no int above 0,
    LayoutError for other layouts.
    """
    check_tensors("pack", ("tensors",) * len(tensors), *tensors)
    if not (is_int(parts) and parts >= 1):
        raise ValueError(f"pack: parts is {described(parts)}; give an int, 1 or more")
    leading = tensors[0].shape[:-1] if tensors else ()
    if not tensors or any(
        x.ndim < 1 or x.shape[:-1] != leading or x.shape[-1] % parts or not x.shape[-1] for x in tensors
    ):
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors) or "no tensors"
        raise ValueError(
            f"pack: the last dim must be a multiple of {parts} above 0, all other dims equal; got {shapes}"
        )
    return apply(PACK, *tensors, widths=tuple([int(x.shape[-1]) // parts for x in tensors]))


def unpack(packed: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """The tensors, each [..., parts * width], from which `pack` made `packed`.

    packed: [..., parts, sum of widths], from `pack`, also after a reshard.
    widths: for each tensor, the width of one part: W / parts.

    Layouts: any with the last dim replicated and `parts` sharded evenly, Partial(sum) included; each tensor has the
    layout of `packed`, with its last dim sharded in place of `parts`.
    Communication: none.
    Raises ValueError where the widths are no ints above 0, or their sum is not the last dim, LayoutError for other
    layouts.
    """
    check_tensors("unpack", ("packed",), packed)
    if not (isinstance(widths, tuple | list) and widths and all(is_int(width) and width >= 1 for width in widths)):
        raise ValueError(f"unpack: widths is {described(widths)}; give ints, 1 or more, one for each packed tensor")
    if packed.ndim < 2:
        raise ValueError(f"unpack takes packed [..., parts, width], got {tuple(packed.shape)}; give a result of pack")
    if sum(widths) != packed.shape[-1]:
        raise ValueError(
            f"unpack: the widths {tuple(widths)} sum to {sum(widths)}, the last dim of {tuple(packed.shape)} is "
            f"{packed.shape[-1]}; give the widths with which the tensors were packed"
        )
    return apply_many(UNPACK, packed, widths=tuple(widths))


def _pack_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    present = [layout for layout in layouts if layout is not None]
    shape = shapes[0]
    assert shape is not None and len(present) == len(layouts), "pack takes no None"
    output = infer.elementwise("pack", True, *present)
    widths = options["widths"]
    parts, num_shards = shape[-1] // widths[0], output.parts(len(shape) - 1)
    if parts % num_shards:
        raise LayoutError(
            f"pack: {parts} parts for tensors whose last dim is cut into {num_shards} shards; give a multiple of "
            f"{num_shards} parts"
        )
    return Sharding(output, (*shape[:-1], parts, sum(widths)), infer_gradient_layouts(output, layouts))


def _unpack_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    (packed,), (shape,) = layouts, shapes
    assert packed is not None and shape is not None, "apply_many passes the packed tensor"
    *leading, parts, _ = shape
    num_shards = packed.parts(len(shape) - 2)
    if packed.parts(len(shape) - 1) > 1 or parts % num_shards:
        raise LayoutError(
            f"unpack: dim {len(shape) - 2} of {shape}, the {parts} parts, must be cut evenly, and the last dim not at "
            f"all; the layout is ({packed}); reshard the packed tensor"
        )
    layout = infer.elementwise("unpack", True, packed)
    first, *further_shapes = ((*leading, parts * width) for width in options["widths"])

    def gradient_layouts(*grads: Layout | None) -> tuple[Layout | None, ...]:
        layouts = {grad for grad in grads if grad is not None}
        if len(layouts) > 1:
            raise LayoutError(
                f"unpack: the gradients arrive as {' and '.join(f'({each})' for each in layouts)}; reshard a result of "
                f"unpack before its use, so that all gradients have one layout"
            )
        return (infer.gradient(layout, layouts.pop(), packed, [packed]),)

    return Sharding(layout, first, gradient_layouts, further_outputs=tuple([(layout, each) for each in further_shapes]))


def _pack_forward(*tensors: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, Tensors]:
    """Tensors [..., P * width] -> packed [..., P, sum of widths]: part p holds part p of every tensor, side by side."""
    parts = [x.reshape(*x.shape[:-1], x.shape[-1] // width, width) for x, width in zip(tensors, widths, strict=True)]
    return torch.cat(parts, -1), ()


def _unpack_forward(packed: Tensor, *, widths: tuple[int, ...]) -> tuple[tuple[Tensor, ...], Tensors]:
    """packed [..., P, sum of widths] -> tensors [..., P * width], in the order of `widths`."""
    return tuple([part.flatten(-2) for part in torch.split(packed, list(widths), -1)]), ()


def _pack_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, widths: tuple[int, ...]) -> Tensors:
    """The gradients of the tensors: `_unpack_forward` of the packed tensor's gradient."""
    parts, _ = _unpack_forward(grad, widths=widths)
    return tuple([part if need else None for part, need in zip(parts, needed, strict=True)])


def _unpack_backward(
    saved: Tensors, grads: tuple[Tensor | None, ...], needed: Sequence[bool], *, widths: tuple[int, ...]
) -> Tensors:
    """The gradient of the packed tensor: `_pack_forward` of the tensors' gradients. None among them means zeros."""
    first = next(i for i, grad in enumerate(grads) if grad is not None)
    like = grads[first]
    assert like is not None, "autograd calls backward with at least one gradient"
    count = like.shape[-1] // widths[first]
    full = [
        like.new_zeros(*like.shape[:-1], count * width) if grad is None else grad
        for grad, width in zip(grads, widths, strict=True)
    ]
    return (_pack_forward(*full, widths=widths)[0],) if needed[0] else (None,)


PACK = Op("pack", _pack_forward, _pack_backward, _pack_rule)
UNPACK = Op("unpack", _unpack_forward, _unpack_backward, _unpack_rule)
