"""dropout on plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, infer

from ..backend import is_compiling
from ..elementwise import add
from ..op import Op
from ..order import checked_order, runs_within
from ..random.philox import check_key
from ..random.sharded import DTYPES, part_of
from ..sharded import Shapes, Sharding, apply, autocasts, check_devices, independent
from . import function


@autocasts("dropout")
def dropout(
    x: Tensor,
    p: float,
    key: int | Tensor,
    name: str | None = None,
    *,
    order: Sequence[tuple[int, int]] | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x with each element zeroed with probability p, and the others divided by 1 - p (Srivastava et al. 2014).

    x: any shape and strides, in bfloat16, float16, float32 or float64; the product is of float32 at least, and rounded
    to x's dtype. p: 0 to 1; 0 gives x itself, 1 gives zeros; else it counts as the nearest multiple of 2**-16, in the divisor too,
    so that the mean is x. What is zeroed is 0 even where x is infinite or NaN.
    key: 64 bits, as weft.mesh.derive_key makes them; with a name, derive_key(key, name) takes its place. Compiled code takes
    it as a tensor of one uint64 on the CPU: an int would be compiled in, and each new one would compile anew.
    Element i of the global tensor, row-major, is zeroed where half i % 8 of block i // 8 of Philox 4x32-10 (Salmon et al.
    2011) is below p * 2**16: bitwise the same mask in every layout, on a CPU and on a GPU, and again in backward, which
    draws it anew: no mask is kept, but of float32 and float64 on a CPU, a byte an element. No rank draws more than its own part.
    order: of x [..., T, H], where the tokens lie in another order than they are read in, which then counts for the mask: as of
    `attention`.
    residual: of the shape of x, which the output is added to; in the same pass where its dtype is that of x.
    Layouts: any, one for x and the residual, Partial(sum) and Partial(avg) included, for every addend gets the one mask; the output lies the same,
    and a Partial(sum) gradient may flow. Communication: none.
    Raises ValueError for p, a key or a dtype that is none of these, and for two devices; LayoutError for another Partial.
    """
    operand, number = check_dropout("dropout", "p", p, key)
    if x.dtype not in DTYPES:
        raise ValueError(f"dropout: x is {x.dtype}; give one of {', '.join(map(str, DTYPES))}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"dropout takes a residual of the shape of x, got {tuple(residual.shape)} and {tuple(x.shape)}; expand one"
        )
    if residual is not None:
        check_devices("dropout", x, residual)
        if residual.dtype not in DTYPES:
            raise ValueError(f"dropout: the residual is {residual.dtype}; give one of {', '.join(map(str, DTYPES))}")
    if residual is not None and (p == 0 or residual.dtype != x.dtype):
        return add(dropout(x, p, key, name, order=order), residual)
    if p == 0:
        return x
    options: dict[str, Any] = {"p": p, "number": number, "name": name}
    if not is_compiling():
        options["held"] = []
    if order is not None:
        if x.ndim < 2:
            raise ValueError(f"dropout: order is of the tokens of x [..., T, H], got shape {tuple(x.shape)}")
        options["order"] = checked_order("dropout", order, x.shape[-2])
    return apply(DROPOUT, x, operand, *(() if residual is None else (residual,)), **options)


def check_dropout(name: str, option: str, p: float, key: int | Tensor | None) -> tuple[Tensor | None, int]:
    """The key as an operand, or as a number; ValueError for a probability or a key that is none. name: of the op."""
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: {option} is {p}; it is a probability, 0 to 1")
    if isinstance(key, Tensor):
        if key.shape != () or key.dtype != torch.uint64 or key.device.type != "cpu":
            raise ValueError(
                f"{name}: the key is a tensor of shape {tuple(key.shape)}, {key.dtype}, on {key.device}; give "
                f"torch.tensor(derive_key(...), dtype=torch.uint64)"
            )
        return key, 0
    if is_compiling():
        raise ValueError(
            f"{name} is compiled with the key {key}; give torch.tensor(derive_key(...), dtype=torch.uint64)"
        )
    number: Any = key
    check_key(number)
    return None, number


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    layout, _, *residual = layouts
    shape = shapes[0]
    assert layout is not None and shape is not None, "x is given"
    others = [each for each in residual if each is not None]
    names = ("x", "the residual")[: 1 + len(others)]
    output = infer.elementwise("dropout", True, layout, *others, operands=names)

    order = options.get("order")

    def local(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        if order is None:
            return {"part": part_of(layout, shape, rank)}
        held = layout.local_slices(shape, rank)
        return {"parts": function.parts_of(shape, held, runs_within(order, held[-2].start, held[-2].stop))}

    return Sharding(output, shape, independent(output, (layout, None, *residual)), local)


DROPOUT = Op("dropout", function.forward, function.backward, _rule, varying=("number", "held"))
