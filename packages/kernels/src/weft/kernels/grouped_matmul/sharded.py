"""grouped_matmul on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, LayoutError, Shard, infer

from ..matmul.sharded.layouts import (
    GRADIENT,
    adds,
    check_activation,
    check_operand,
    check_residual_layout,
    kept,
    summed_axes,
    whole,
)
from ..op import Op
from ..sharded import Shapes, Sharding, apply, autocasts, check_devices
from . import function
from .checks import check_accumulation, check_grouped

BACKWARD = "grouped_matmul, backward"


@autocasts("grouped_matmul")
def grouped_matmul(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate_into: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
) -> Tensor:
    """Rows sorted by group, each group times a matrix of its own, as experts are computed.

    Of the rows of group g it is `act(alpha * a[start:stop] @ b[g] + bias[g]) + beta * residual[start:stop]`.

    a: [N, K]. b: [G, K, M]. offsets: [G] int32, where each group ends, as of torch.nn.functional.grouped_mm; a group may be empty.
    They lie where a lies, and no host waits for them. Returns [N, M], in out_dtype or a's dtype, bfloat16 for 8-bit factors; zeros in
    rows behind the last group, where nothing is added either.
    bias: [G, M]. activation: as of `linear`. residual: any shape that broadcasts to the output. On a GPU all is computed before the
    product is stored. a_scale, b_scale: float32, what 8-bit factors are multiplied by: one number, or one a row of a, and one a group or
    [G, M] of b. Such factors have no gradient.
    accumulate_into: [G, K, M], float32 for 16-bit factors, to which `a[:, start:stop] @ b[start:stop]` of each group is added in place,
    for a [K, N] and b [N, M], and which is returned: the gradients of experts over microbatches. Nothing follows, no gradient is recorded.
    Saved for backward: a, b and, with an activation, what it is applied to; of relu without a residual the output instead.
    Layouts: rows are whole, and so are the offsets. Matrices sharded on M shard the output; those and a sharded on K leave it
    Partial(sum); and so do matrices sharded on G, each rank with groups of its own (expert parallel). The bias and b's scales lie as the
    matrices do, the residual as the output; where that is Partial(sum) it is whole, and added once. There is no activation of sums over K. accumulate_into: all of a and b that it takes. Communication: none.
    Raises LayoutError for any other layouts; ValueError for shapes, dtypes, devices and options that do not go together, and on a CPU for
    offsets that fall, or end behind the rows.
    """
    check_devices("grouped_matmul", a, b, offsets, bias, residual, a_scale, b_scale, accumulate_into)
    if accumulate_into is not None:
        others = (bias, activation, residual, out_dtype, alpha, beta, a_scale, b_scale)
        check_accumulation(a, b, offsets, accumulate_into, *others)
        with torch.no_grad():
            apply(ACCUMULATE, a, b, offsets, accumulate_into)
        return accumulate_into
    check_grouped(a, b, offsets, bias, activation, residual, out_dtype, a_scale, b_scale)
    if a.dtype.itemsize == 1:
        out_dtype = out_dtype or torch.bfloat16
    return apply(
        GROUPED_MATMUL, a, b, offsets, bias, residual, a_scale, b_scale,
        activation=activation, alpha=alpha, beta=beta, out_dtype=out_dtype,
    )  # fmt: skip


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    a, b, offsets, bias, residual, a_scale, b_scale = layouts
    a_shape, b_shape, _, _, residual_shape, a_scale_shape, b_scale_shape = shapes
    assert a is not None and b is not None and offsets is not None and a_shape and b_shape, "all are given"
    _check_whole("the rows of a are", a, 0, offsets)
    output = infer.einsum("nk,gkm->nm", a, b, name="grouped_matmul", operands=("a", "b"))
    groups = kept(b, "gkm", "g")
    check_operand("grouped_matmul", "bias", bias, kept(b, "gkm", "gm"), output)
    check_operand("grouped_matmul", "a_scale", a_scale, kept(a, "nk", "n" if a_scale_shape else ""), output)
    check_operand("grouped_matmul", "b_scale", b_scale, kept(b, "gkm", "gm"[: len(b_scale_shape or ())]), output)
    complete, shape = whole(output), (a_shape[0], b_shape[2])
    if residual is not None:
        assert residual_shape is not None, "it has a layout"
        check_residual_layout("grouped_matmul", residual, residual_shape, complete, shape, output)
    # A row is complete on the rank that has its group, and zeros on others: what follows a product follows it there.
    of_own = output.replace(**{axis: "R" for axis in summed_axes(output) if b[axis] == Shard(0)})
    activation = options["activation"]
    check_activation("grouped_matmul", activation, of_own)

    def gradients(grad: Layout) -> tuple[Layout | None, ...]:
        if activation is not None:
            grad = infer.gradient(of_own, grad, of_own, (of_own,))
        return (
            infer.einsum("nm,gkm->nk", grad, b, name=BACKWARD, operands=(GRADIENT, "b")),
            infer.einsum("nm,nk,g->gkm", grad, a, groups, name=BACKWARD, operands=(GRADIENT, "a", "the groups of b")),
            None,
            None
            if bias is None
            else infer.einsum("nm,g->gm", grad, groups, name=BACKWARD, operands=(GRADIENT, "the groups of b")),
            None if residual is None else infer.gradient(complete, grad, residual, (complete, residual)),
            None,
            None,
        )

    def local(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"first": b.local_slices(b_shape, rank)[0].start, "adds": adds(of_own, rank)}

    return Sharding(output, shape, gradients, local)


def _check_whole(what: str, rows: Layout, dim: int, offsets: Layout) -> None:
    """Raises LayoutError for offsets or rows that are cut. what: the rows of which operand, and a verb."""
    wanted = Layout(offsets.mesh)
    if offsets != wanted:
        raise LayoutError(f"grouped_matmul: the offsets are ({offsets}); reshard them to ({wanted})", (wanted,))
    if cut := rows.shard_order.get(dim):
        wanted = rows.replace(**dict.fromkeys(cut, "R"))
        raise LayoutError(
            f"grouped_matmul: {what} cut over {', '.join(map(repr, cut))}, and the offsets count all rows; reshard "
            f"{what.split()[-2]} to ({wanted})",
            (wanted,),
        )


def _rule_of_accumulation(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    a, b, offsets, into = layouts
    shape = shapes[3]
    assert a is not None and b is not None and offsets is not None and into is not None and shape, "all are given"
    _check_whole("the rows of b are", b, 0, offsets)
    _check_whole("the columns of a are", a, 1, offsets)
    groups = kept(into, "gkm", "g")
    check_operand(
        "grouped_matmul",
        "sum to accumulate into",
        into,
        infer.einsum(
            "kn,nm,g->gkm", a, b, groups, name="grouped_matmul", operands=("a", "b", "the groups of accumulate_into")
        ),
        into,
    )

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
