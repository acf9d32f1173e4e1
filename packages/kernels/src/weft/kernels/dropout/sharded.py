"""Dropout on plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, infer
from weft.reshard.extension import between_graphs

from ..dispatch.arguments import described, is_number
from ..dispatch.backend import is_compiling
from ..dispatch.op import Op
from ..dispatch.sharded import Shapes, Sharding, apply, autocasts, check_operands, infer_gradient_layouts
from ..dispatch.token_order import checked_order, checked_orders, runs_within
from ..plain import add
from ..random.philox import check_key
from ..random.sharded import DTYPES, part_of
from . import function


@autocasts("dropout")
def dropout(
    x: Tensor,
    p: float,
    key: int | Tensor,
    name: str | None = None,
    *,
    order: Sequence[tuple[int, int]] | None = None,
    orders: Sequence[Sequence[tuple[int, int]]] | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x with each element set to zero with probability p, and divided by 1 - p otherwise (Srivastava et al. 2014).

    x: any shape and strides, in bfloat16, float16, float32 or float64. The product is computed in float32 at least,
    then rounded to x's dtype. A dropped element is 0 even where x is infinite or NaN.
    p: 0 to 1. 0 returns x itself, 1 gives zeros. Any p between is rounded to a multiple of 2**-16, in the divisor
    too, so the mean of the output is x.
    key: 64 bits, from weft.mesh.derive_key. In compiled code give a tensor of one uint64 on the CPU: an int is compiled
    into the graph, and each new int compiles again.
    name: with a name, the key is derive_key(key, name). None: `key` itself.
    order: for x [..., T, H] with tokens stored in another order than the sequence's, as in `attention`. The mask then
    follows the sequence. None: memory has the sequence's order.
    orders: for x [B, T, H], an order for each row of this rank's part of x, where the rows differ. None: `order`.
    residual: a tensor of the shape of x, added to the output; in the same pass where its dtype is x's. None: nothing.

    Philox 4x32-10 (Salmon et al. 2011) gives blocks of eight 16-bit numbers. Element i of the global tensor, row-major,
    is dropped where number i % 8 of block i // 8 is below p * 2**16. The mask is bitwise the same in every layout, on a
    CPU and on a GPU. No rank draws more than its own part. Backward draws the mask again instead of saving it, except
    for float32 and float64 on a CPU, where a mask of one byte an element is saved.

    Layouts: any, the same for x and the residual. Partial(sum) and Partial(avg) are allowed, as every rank's addend
    gets the same mask. The output has x's layout, and its gradient may be Partial(sum).
    Communication: none.
    Raises ValueError for p, a key or a dtype outside these, and for tensors on two devices; LayoutError for another
    Partial.
    """
    check_operands("dropout", ("x", "residual"), 1, x, residual)
    check_probability("dropout", "p", p)
    check_name("dropout", "name", name)
    operand, number = checked_key("dropout", "key", key)
    if x.dtype not in DTYPES:
        raise ValueError(f"dropout: x is {x.dtype}; give one of {', '.join(map(str, DTYPES))}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"dropout takes a residual of the shape of x, got {tuple(residual.shape)} and {tuple(x.shape)}; expand one"
        )
    if residual is not None and residual.dtype not in DTYPES:
        raise ValueError(f"dropout: the residual is {residual.dtype}; give one of {', '.join(map(str, DTYPES))}")
    options: dict[str, Any] = {"p": p, "number": number, "name": name}
    if order is not None:
        if x.ndim < 2:
            raise ValueError(
                f"dropout: order needs x of shape [..., T, H], with tokens in dim -2; got {tuple(x.shape)}"
            )
        options["order"] = checked_order("dropout", order, x.shape[-2])
    if orders is not None:
        if x.ndim != 3 or order is not None:
            raise ValueError(f"dropout: orders needs x of shape [B, T, H] and no order; got {tuple(x.shape)}")
        options["orders"] = checked_orders("dropout", orders, x.shape[-2])
        options["by_row"] = True
    if residual is not None and (p == 0 or residual.dtype != x.dtype):
        return add(dropout(x, p, key, name, order=order, orders=orders), residual)
    if p == 0:
        return x
    if not is_compiling():
        options["saved_mask"] = []
    return apply(DROPOUT, x, operand, *(() if residual is None else (residual,)), **options)


# `dropout` with `orders`, called between two graphs under torch.compile: orders differ from batch to batch, and a graph
# with the call would hold for a single batch's orders.
dropout_by_row = between_graphs("each row has the order of its documents; compile the block without fullgraph")(dropout)


def check_probability(name: str, option: str, p: float) -> None:
    """Raises ValueError unless p is a number from 0 to 1. name, option: of the op, and of the argument p."""
    if not (is_number(p) and 0 <= p <= 1):
        raise ValueError(f"{name}: {option} is {described(p)}; give a probability, 0 to 1")


def check_name(op: str, option: str, name: str | None) -> None:
    """Raises ValueError unless the name of a mask is text or None. op, option: for the message."""
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{op}: {option} is {described(name)}; give the module's name as text, or None")


def check_key_kind(op: str, option: str, key: object) -> None:
    """Raises ValueError for a key which is neither an int of 64 bits nor a tensor of one. option: the argument."""
    if not isinstance(key, Tensor):
        check_key(op, option, key)
    elif key.shape != () or key.dtype != torch.uint64 or key.device.type != "cpu":
        raise ValueError(
            f"{op}: {option} is a tensor of shape {tuple(key.shape)}, {key.dtype}, on {key.device}; give "
            f"torch.tensor(derive_key(...), dtype=torch.uint64)"
        )


def checked_key(op: str, option: str, key: int | Tensor | None) -> tuple[Tensor | None, int]:
    """(key tensor, 0) or (None, key number).

    Raises ValueError as `check_key_kind`, for None, and for an int in compiled code.
    """
    if key is None:
        raise ValueError(f'{op}: dropout needs a key, and {option} is None; give derive_key(seed, "dropout", step)')
    if isinstance(key, Tensor):
        check_key_kind(op, option, key)
        return key, 0
    if is_compiling():
        raise ValueError(
            f"{op} is compiled with {option}={key}, an int; give torch.tensor(derive_key(...), dtype=torch.uint64)"
        )
    return None, check_key(op, option, key)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    layout, _, *residual = layouts
    shape = shapes[0]
    assert layout is not None and shape is not None, "x is given"
    residuals = [each for each in residual if each is not None]
    names = ("x", "the residual")[: 1 + len(residuals)]
    output = infer.elementwise("dropout", True, layout, *residuals, operands=names)

    order = options.get("order")

    def local(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        if options.get("by_row"):
            return {"box": (shape, layout.local_slices(shape, rank))}
        if order is None:
            return {"part": part_of(layout, shape, rank)}
        box = layout.local_slices(shape, rank)
        return {"parts": function.parts_of(shape, box, runs_within(order, box[-2].start, box[-2].stop))}

    return Sharding(output, shape, infer_gradient_layouts(output, (layout, None, *residual)), local)


DROPOUT = Op("dropout", function.forward, function.backward, _rule, varying=("number", "saved_mask", "orders"))
