"""Ops that plain torch computes on every device: on plain tensors and DTensors, with their local computation.

`add` and `sigmoid_gate` work element by element. `pack` and `unpack` join tensors for a single reshard of all of them,
and take them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from weft.mesh import Layout, LayoutError, infer

from ..dispatch.arguments import check_number, check_tensors, described, is_int
from ..dispatch.backend import check_floats
from ..dispatch.op import Op, Tensors
from ..dispatch.sharded import Shapes, Sharding, apply, apply_many, autocasts, check_operands, infer_gradient_layouts


@autocasts("add")
def add(x: Tensor, y: Tensor, *, alpha: float = 1) -> Tensor:
    """`x + alpha * y`, for residual streams. Unlike the addition of DTensors, `add` never reshards an operand.

    x: any shape. Returns a tensor of this shape.
    y: the shape of x, or x's last dims: learned positions [T, H] are added to x [B, T, H].

    Layouts: the same for x and y, Partial(sum) included. A y with fewer dims is sharded as x is on the dims of y, and
    no Partial is allowed; y's gradient is Partial(sum) on the axes which shard the missing dims. The output has x's
    layout.
    Communication: none.
    Raises LayoutError for other layouts; ValueError for other shapes and dtypes, for tensors on two devices, and for an
    alpha which is no finite number.
    """
    check_operands("add", ("x", "y"), 2, x, y)
    check_number("add", "alpha", alpha)
    if alpha != 1 and not is_int(alpha) and not (_holds_fractions(x) or _holds_fractions(y)):
        raise ValueError(f"add: alpha is {alpha} for tensors of {x.dtype} and {y.dtype}; give an int, or cast x")
    num_missing = x.ndim - y.ndim
    if num_missing < 0 or x.shape[num_missing:] != y.shape:
        raise ValueError(
            f"add takes two tensors of one shape, or y with the last dims of x, got {tuple(x.shape)} and "
            f"{tuple(y.shape)}; exchange or expand them"
        )
    return apply(ADD, x, y, num_missing=num_missing, alpha=alpha)


def _holds_fractions(x: Tensor) -> bool:
    """Whether x holds floating-point or complex numbers, and no ints."""
    return x.is_floating_point() or x.is_complex()


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, y = layouts
    shape, last = shapes
    assert x is not None and y is not None and shape is not None and last is not None, "both are given"
    if options["num_missing"]:
        output = infer.elementwise("add", False, x, y, shapes=(shape, last), operands=("x", "y"))
    else:
        output = infer.elementwise("add", True, x, y, operands=("x", "y"))
    return Sharding(output, shape, infer_gradient_layouts(output, layouts))


def forward(x: Tensor, y: Tensor, *, num_missing: int = 0, alpha: float = 1) -> tuple[Tensor, Tensors]:
    """x + alpha * y, of the shape of x. y lacks the first `num_missing` dims of x; no other dim is broadcast.

    Raises ValueError for any other shapes.
    """
    if x.shape[num_missing:] != y.shape:
        raise ValueError(
            f"add takes, beside x of shape {tuple(x.shape)}, a y of shape {tuple(x.shape[num_missing:])}, got "
            f"{tuple(y.shape)}; expand y"
        )
    return x + y if alpha == 1 else torch.add(x, y, alpha=alpha), ()


def backward(
    saved: Tensors, grad: Tensor, needed: Sequence[bool], *, num_missing: int = 0, alpha: float = 1
) -> Tensors:
    """dx = grad; dy = alpha * grad, summed over the first `num_missing` dims."""
    dy = None if not needed[1] else grad if alpha == 1 else grad * alpha
    if dy is not None and num_missing:
        dy = dy.sum(tuple(range(num_missing)))
    return grad if needed[0] else None, dy


ADD = Op("add", forward, backward, _rule)


@autocasts("sigmoid_gate")
def sigmoid_gate(x: Tensor, score: Tensor) -> Tensor:
    """`x * sigmoid(score)`, for a shared expert's output; score has one number for each row of x.

    x: [..., H]. score: [..., 1]. Returns [..., H].

    Layouts: the same for x and score, with the last dim whole. The output has x's layout.
    Communication: none.
    Raises LayoutError for other layouts; ValueError for other shapes, and for tensors on two devices.
    """
    check_operands("sigmoid_gate", ("x", "score"), 2, x, score)
    if (*x.shape[:-1], 1) != tuple(score.shape) or not x.ndim:
        raise ValueError(
            f"sigmoid_gate takes x [..., H] and a score [..., 1] for each row, got {tuple(x.shape)} and "
            f"{tuple(score.shape)}; give a score of shape {(*x.shape[:-1], 1)}"
        )
    check_floats("sigmoid_gate", ("x", "the score"), x, score)
    return apply(SIGMOID_GATE, x, score)


def _gate_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, score = layouts
    assert x is not None and score is not None and shapes[0] is not None and shapes[1] is not None, "both are given"
    output = infer.elementwise("sigmoid_gate", False, x, score, shapes=(shapes[0], shapes[1]), operands=("x", "score"))
    return Sharding(output, shapes[0], infer_gradient_layouts(output, layouts))


def _gate_forward(x: Tensor, score: Tensor) -> tuple[Tensor, Tensors]:
    """x * sigmoid(score)."""
    return x * torch.sigmoid(score), (x, score)


def gate_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool]) -> Tensors:
    """dx = grad * sigmoid(score); dscore = sum of grad * x over a row, times the sigmoid's derivative."""
    x, score = saved
    assert x is not None and score is not None, "forward saves both"
    gate = torch.sigmoid(score)
    dx = grad * gate if needed[0] else None
    dscore = (grad * x).sum(-1, keepdim=True) * (gate * (1 - gate)) if needed[1] else None
    return dx, dscore


SIGMOID_GATE = Op("sigmoid_gate", _gate_forward, gate_backward, _gate_rule)


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
