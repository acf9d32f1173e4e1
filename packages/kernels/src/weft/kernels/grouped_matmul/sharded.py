"""grouped_matmul on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, LayoutError, infer

from ..backend import can_read
from ..matmul.checks import check_dtypes
from ..matmul.sharded.layouts import kept
from ..op import Op
from ..sharded import Shapes, Sharding, apply, autocasts
from . import function


@autocasts("grouped_matmul")
def grouped_matmul(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Rows sorted by group, each group times a matrix of its own: `a[start:stop] @ b[g]`, as experts are computed.

    a: [N, K]. b: [G, K, M]. offsets: [G] int32, where each group ends, as of torch.nn.functional.grouped_mm; a group may be empty.
    They lie where a lies, and no host waits for them. Returns [N, M], zeros in rows behind the last group.
    Layouts: rows are whole, and so are the offsets. Matrices sharded on M shard the output; those and a sharded on K leave it
    Partial(sum); and so do matrices sharded on G, each rank with groups of its own (expert parallel). Communication: none.
    Raises LayoutError for any other layouts; ValueError for shapes and dtypes that do not go together, and on a CPU for offsets
    that fall, or end behind the rows.
    """
    shapes = tuple(tuple(each.shape) for each in (a, b, offsets))
    if len(shapes[0]) != 2 or len(shapes[1]) != 3 or shapes[0][1] != shapes[1][1] or shapes[2] != shapes[1][:1]:
        raise ValueError(
            f"grouped_matmul takes a [N, K], b [G, K, M] and offsets [G], got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    check_dtypes("grouped_matmul", a, b)
    if offsets.dtype != torch.int32 or a.dtype.itemsize == 1:
        raise ValueError(
            f"grouped_matmul takes offsets in torch.int32 and factors of 16 bits at least, got {offsets.dtype} and {a.dtype}; "
            f"cast them with .to()"
        )
    if type(offsets) is Tensor and can_read(offsets):
        ends = [0, *offsets.tolist()]
        if ends != sorted(ends) or ends[-1] > shapes[0][0]:
            raise ValueError(
                f"grouped_matmul: the groups end at {ends[1:]}, of {shapes[0][0]} rows; give offsets that rise, to at most "
                f"{shapes[0][0]}: the cumulative sum of the groups' sizes"
            )
    return apply(GROUPED_MATMUL, a, b, offsets)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    a, b, offsets = layouts
    a_shape, b_shape, _ = shapes
    assert a is not None and b is not None and offsets is not None and a_shape and b_shape, "all are given"
    wanted = Layout(offsets.mesh)
    if offsets != wanted:
        raise LayoutError(f"grouped_matmul: the offsets are ({offsets}); reshard them to ({wanted})", (wanted,))
    if rows := a.shard_order.get(0):
        whole = a.replace(**dict.fromkeys(rows, "R"))
        raise LayoutError(
            f"grouped_matmul: the rows of a are cut over {', '.join(map(repr, rows))}, and the offsets count all rows; reshard a "
            f"to ({whole})",
            (whole,),
        )
    output = infer.einsum("nk,gkm->nm", a, b)
    groups = kept(b, "gkm", "g")

    def gradients(grad: Layout) -> tuple[Layout | None, ...]:
        return infer.einsum("nm,gkm->nk", grad, b), infer.einsum("nm,nk,g->gkm", grad, a, groups), None

    def local(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"first": b.local_slices(b_shape, rank)[0].start}

    return Sharding(output, (a_shape[0], b_shape[2]), gradients, local)


GROUPED_MATMUL = Op("grouped_matmul", function.forward, function.backward, _rule, weights=(1,))
