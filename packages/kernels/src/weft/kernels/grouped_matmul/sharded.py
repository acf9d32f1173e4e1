"""grouped_matmul on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, LayoutError, Shard, infer

from ..backend import can_read
from ..matmul.checks import WIDE, check_activation_name, check_dtypes
from ..matmul.sharded.layouts import adds, check_activation, check_operand, kept, summed_axes
from ..op import Op
from ..sharded import Shapes, Sharding, apply, autocasts
from . import function


@autocasts("grouped_matmul")
def grouped_matmul(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate_into: Tensor | None = None,
) -> Tensor:
    """Rows sorted by group, each group times a matrix of its own: `act(a[start:stop] @ b[g] + bias[g])`, as experts are computed.

    a: [N, K]. b: [G, K, M]. offsets: [G] int32, where each group ends, as of torch.nn.functional.grouped_mm; a group may be empty.
    They lie where a lies, and no host waits for them. Returns [N, M], in out_dtype or a's dtype, zeros in rows behind the last group.
    bias: [G, M]. activation: as of `linear`; on a GPU both are computed before the product is stored.
    accumulate_into: [G, K, M], float32 for 16-bit factors, to which `a[:, start:stop] @ b[start:stop]` of each group is added in place,
    for a [K, N] and b [N, M], and which is returned: the gradients of experts over microbatches. Nothing follows, no gradient is recorded.
    Saved for backward: a, b and, with an activation, what it is applied to; of relu the output instead.
    Layouts: rows are whole, and so are the offsets. Matrices sharded on M shard the output; those and a sharded on K leave it
    Partial(sum); and so do matrices sharded on G, each rank with groups of its own (expert parallel). The bias lies as the matrices
    do. There is no activation of sums over K. accumulate_into: all of a and b that it takes. Communication: none.
    Raises LayoutError for any other layouts; ValueError for shapes, dtypes and options that do not go together, and on a CPU for
    offsets that fall, or end behind the rows.
    """
    if accumulate_into is not None:
        return _accumulated(a, b, offsets, accumulate_into, bias, activation, out_dtype)
    shapes = tuple(tuple(each.shape) for each in (a, b, offsets))
    if len(shapes[0]) != 2 or len(shapes[1]) != 3 or shapes[0][1] != shapes[1][1] or shapes[2] != shapes[1][:1]:
        raise ValueError(
            f"grouped_matmul takes a [N, K], b [G, K, M] and offsets [G], got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    if bias is not None and tuple(bias.shape) != (shapes[1][0], shapes[1][2]):
        raise ValueError(
            f"grouped_matmul takes a bias of shape {(shapes[1][0], shapes[1][2])}, a row for each group, got {tuple(bias.shape)}"
        )
    check_activation_name("grouped_matmul", activation)
    if out_dtype is not None and out_dtype not in WIDE:
        raise ValueError(f"grouped_matmul: out_dtype is {out_dtype}; give one of {', '.join(map(str, WIDE))}")
    _check(a, b, offsets, shapes[0][0])
    return apply(GROUPED_MATMUL, a, b, offsets, bias, activation=activation, out_dtype=out_dtype)


def _accumulated(a: Tensor, b: Tensor, offsets: Tensor, into: Tensor, *others: object) -> Tensor:
    """others: what may not be given beside it."""
    shapes = tuple(tuple(each.shape) for each in (a, b, into, offsets))
    wanted = torch.promote_types(a.dtype, torch.float32) if a.dtype in WIDE else torch.float32
    if (
        [*map(len, shapes)] != [2, 2, 3, 1]
        or shapes[0][1] != shapes[1][0]
        or shapes[2] != (*shapes[3], shapes[0][0], shapes[1][1])
        or into.dtype not in (wanted, a.dtype)
    ):
        raise ValueError(
            f"grouped_matmul: beside accumulate_into [G, K, M], of {wanted} for factors of {a.dtype}, there are a [K, N], b [N, M] and "
            f"offsets [G]; got {into.dtype} of shape {shapes[2]}, {shapes[0]}, {shapes[1]} and {shapes[3]}"
        )
    if any(each is not None for each in others):
        raise ValueError(
            "grouped_matmul: beside accumulate_into there is no bias, activation or out_dtype; apply them to the sum when it is complete"
        )
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or into.requires_grad):
        raise ValueError("grouped_matmul: accumulate_into records no gradient; call it under torch.no_grad()")
    _check(a, b, offsets, shapes[1][0])
    with torch.no_grad():
        apply(ACCUMULATE, a, b, offsets, into)
    return into


def _check(a: Tensor, b: Tensor, offsets: Tensor, rows: int) -> None:
    """Raises ValueError for dtypes, and for offsets where their values can be read."""
    check_dtypes("grouped_matmul", a, b)
    if offsets.dtype != torch.int32 or a.dtype.itemsize == 1:
        raise ValueError(
            f"grouped_matmul takes offsets in torch.int32 and factors of 16 bits at least, got {offsets.dtype} and {a.dtype}; "
            f"cast them with .to()"
        )
    if type(offsets) is Tensor and can_read(offsets):
        ends = [0, *offsets.tolist()]
        if ends != sorted(ends) or ends[-1] > rows:
            raise ValueError(
                f"grouped_matmul: the groups end at {ends[1:]}, of {rows} rows; give offsets that rise, to at most {rows}: "
                f"the cumulative sum of the groups' sizes"
            )


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    a, b, offsets, bias = layouts
    a_shape, b_shape, *_ = shapes
    assert a is not None and b is not None and offsets is not None and a_shape and b_shape, "all are given"
    _check_whole("the rows of a are", a, 0, offsets)
    output = infer.einsum("nk,gkm->nm", a, b)
    groups = kept(b, "gkm", "g")
    check_operand("grouped_matmul", "bias", bias, kept(b, "gkm", "gm"), output)
    # A row is complete on the rank that has its group, and zeros on others: what follows a product follows it there.
    of_own = output.replace(**{axis: "R" for axis in summed_axes(output) if b[axis] == Shard(0)})
    activation = options["activation"]
    check_activation("grouped_matmul", activation, of_own)

    def gradients(grad: Layout) -> tuple[Layout | None, ...]:
        if activation is not None:
            grad = infer.gradient(of_own, grad, of_own, (of_own,))
        return (
            infer.einsum("nm,gkm->nk", grad, b),
            infer.einsum("nm,nk,g->gkm", grad, a, groups),
            None,
            None if bias is None else infer.einsum("nm,g->gm", grad, groups),
        )

    def local(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"first": b.local_slices(b_shape, rank)[0].start, "add_bias": adds(of_own, rank)}

    return Sharding(output, (a_shape[0], b_shape[2]), gradients, local)


def _check_whole(what: str, rows: Layout, dim: int, offsets: Layout) -> None:
    """Raises LayoutError for offsets or rows that are cut. what: the rows of which operand, and a verb."""
    wanted = Layout(offsets.mesh)
    if offsets != wanted:
        raise LayoutError(f"grouped_matmul: the offsets are ({offsets}); reshard them to ({wanted})", (wanted,))
    if cut := rows.shard_order.get(dim):
        whole = rows.replace(**dict.fromkeys(cut, "R"))
        raise LayoutError(
            f"grouped_matmul: {what} cut over {', '.join(map(repr, cut))}, and the offsets count all rows; reshard "
            f"{what.split()[-2]} to ({whole})",
            (whole,),
        )


def _rule_of_accumulation(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    a, b, offsets, into = layouts
    shape = shapes[3]
    assert a is not None and b is not None and offsets is not None and into is not None and shape, "all are given"
    _check_whole("the rows of b are", b, 0, offsets)
    _check_whole("the columns of a are", a, 1, offsets)
    groups = kept(into, "gkm", "g")
    check_operand("grouped_matmul", "sum to accumulate into", into, infer.einsum("kn,nm,g->gkm", a, b, groups), into)

    def local(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"first": into.local_slices(shape, rank)[0].start}

    return Sharding(into, shape, lambda grad: (None,) * 4, local)


def _dtype(dtype: torch.dtype, options: dict[str, Any]) -> torch.dtype:
    wanted: torch.dtype | None = options["out_dtype"]
    return wanted or dtype


def _inferred(*tensors: Tensor | None, **options: Any) -> Tensor:
    return function.forward(*tensors, keep=False, **options)[0]  # type: ignore[arg-type]  # the factors are given


GROUPED_MATMUL = Op(
    "grouped_matmul",
    function.forward,
    function.backward,
    _rule,
    _dtype,
    inference=_inferred,
    weights=(1, 3),
    of_products=function.of_products,
)
ACCUMULATE = Op("grouped_matmul_accumulate", function.accumulate, lambda *_, **__: (None,) * 4, _rule_of_accumulation)
