"""`grouped_matmul` on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, LayoutError, Shard, infer

from ..dispatch.op import Op
from ..dispatch.sharded import Shapes, Sharding, apply, autocasts, check_operands
from ..matmul.checks import check_factors
from ..matmul.sharded.layout_rule import (
    GRADIENT,
    adds_bias,
    check_activation,
    check_operand,
    check_residual_layout,
    layout_of_dims,
    output_dtype,
    summed_axes,
    without_partial,
)
from . import function
from .function import check_accumulation, check_grouped

NAMES = ("a", "b", "offsets", "bias", "residual", "a_scale", "b_scale", "accumulate_into")  # the operands
BACKWARD = "grouped_matmul, backward"  # the op's name in messages of backward


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
    """Each group of rows times the group's matrix, as the experts of a mixture are computed. Rows are sorted by group.

    For the rows start to stop of group g, the output is
    `act(alpha * a[start:stop] @ b[g] + bias[g]) + beta * residual[start:stop]`.

    a: [N, K].
    b: [G, K, M], a matrix for each group.
    offsets: [G] int32 on the device of a, the end of each group, as in torch.nn.functional.grouped_mm. A group may be
    empty. On a GPU the host does not wait for the offsets.
    Returns [N, M] in out_dtype; None means a's dtype, or bfloat16 for 8-bit factors. Rows behind the last group are
    zero; no bias or residual is added there.
    bias, activation, residual, a_scale, b_scale: None leaves the term, the function or the factor out.
    bias: [G, M].
    activation: as in `linear`.
    residual: any shape which broadcasts to the output. On a GPU the kernel applies alpha, scales, bias, activation and
    residual before storing the output: no further pass over the output is made.
    a_scale, b_scale: float32 factors of 8-bit a and b. For a, a number or [N]; for b, a number, [G] or [G, M]. 8-bit
    factors have no gradient.
    accumulate_into: [G, K, M], for 16-bit factors in float32 or their dtype. Computes another product: of a [K, N] and
    b [N, M], where the groups divide the columns of a and the rows of b. Adds `a[:, start:stop] @ b[start:stop]` to
    `accumulate_into[g]` in place for each group g, and returns accumulate_into. For the experts' weight gradients,
    summed over microbatches. No epilogue is allowed, and no gradient is recorded. None: the product above.
    Saved for backward: a, b, offsets and, with an activation, the pre-activation; for relu without a residual the
    output instead.

    Layouts: the rows and the offsets are replicated. b sharded on M shards the output. a and b sharded on K give a
    Partial(sum) output, as does b sharded on G, where each rank has groups of its own (expert parallel). bias and
    b_scale are sharded as b is. The residual has the output's layout, with Replicate in place of Partial(sum); among
    ranks whose outputs are summed, a single rank adds the residual of a row. An activation is refused where the output
    is a sum over K. accumulate_into has the layout of the product.
    Communication: none.
    Raises LayoutError for further layouts; ValueError for mismatched shapes, dtypes, devices or options, and on a CPU
    for offsets which decrease or exceed N.
    """
    tensors = (a, b, offsets, bias, residual, a_scale, b_scale, accumulate_into)
    check_operands("grouped_matmul", NAMES, 3, *tensors)
    check_factors("grouped_matmul", alpha, beta)
    if accumulate_into is not None:
        options = (bias, activation, residual, out_dtype, alpha, beta, a_scale, b_scale)
        check_accumulation(a, b, offsets, accumulate_into, *options)
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
    """The layout rule of `GROUPED_MATMUL`. layouts, shapes: of a, b, offsets, bias, residual, a_scale and b_scale."""
    a, b, offsets, bias, residual, a_scale, b_scale = layouts
    a_shape, b_shape, _, _, residual_shape, a_scale_shape, b_scale_shape = shapes
    assert a is not None and b is not None and offsets is not None and a_shape and b_shape, "apply passes all"
    _check_whole("the rows of a are", a, 0, offsets)
    output = infer.einsum("nk,gkm->nm", a, b, name="grouped_matmul", operands=("a", "b"))
    groups = layout_of_dims(b, "gkm", "g")
    check_operand("grouped_matmul", "bias", bias, layout_of_dims(b, "gkm", "gm"), output)
    check_operand("grouped_matmul", "a_scale", a_scale, layout_of_dims(a, "nk", "n" if a_scale_shape else ""), output)
    check_operand(
        "grouped_matmul", "b_scale", b_scale, layout_of_dims(b, "gkm", "gm"[: len(b_scale_shape or ())]), output
    )
    complete, shape = without_partial(output), (a_shape[0], b_shape[2])
    if residual is not None:
        assert residual_shape is not None, "it has a layout"
        check_residual_layout("grouped_matmul", residual, residual_shape, complete, shape, output)
    # On axes that shard the groups, a row is complete on the rank with the row's group, and zero on all other ranks.
    # The rank with the group can therefore apply the epilogue.
    epilogue_layout = output.replace(**{axis: "R" for axis in summed_axes(output) if b[axis] == Shard(0)})
    activation = options["activation"]
    check_activation("grouped_matmul", activation, epilogue_layout)

    def gradient_layouts(grad: Layout) -> tuple[Layout | None, ...]:
        if activation is not None:
            grad = infer.gradient(epilogue_layout, grad, epilogue_layout, (epilogue_layout,))
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

    def local_options(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        # first: the global number of this rank's first group. adds: whether this rank adds bias and residual.
        return {"first": b.local_slices(b_shape, rank)[0].start, "adds": adds_bias(epilogue_layout, rank)}

    return Sharding(output, shape, gradient_layouts, local_options)


def _check_whole(what: str, rows: Layout, dim: int, offsets: Layout) -> None:
    """Raises LayoutError if the offsets are sharded, or the dim which the offsets divide into groups.

    rows: the layout of a or b. dim: the divided dim.
    what: the beginning of the message, naming the divided dim: "the rows of a are" or "the columns of a are".
    """
    wanted = Layout(offsets.mesh)
    if offsets != wanted:
        raise LayoutError(f"grouped_matmul: the offsets are ({offsets}); reshard them to ({wanted})", (wanted,))
    if axes := rows.shard_order.get(dim):
        wanted = rows.replace(**dict.fromkeys(axes, "R"))
        raise LayoutError(
            f"grouped_matmul: {what} sharded over {', '.join(map(repr, axes))}, but the offsets count all rows; "
            f"reshard {what.split()[-2]} to ({wanted})",
            (wanted,),
        )


def _rule_of_accumulation(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `ACCUMULATE`. layouts, shapes: of a, b, offsets and accumulate_into."""
    a, b, offsets, total_layout = layouts
    shape = shapes[3]
    assert a is not None and b is not None and offsets is not None and total_layout is not None and shape, (
        "apply passes all"
    )
    _check_whole("the rows of b are", b, 0, offsets)
    _check_whole("the columns of a are", a, 1, offsets)
    groups = layout_of_dims(total_layout, "gkm", "g")
    check_operand(
        "grouped_matmul",
        "sum to accumulate into",
        total_layout,
        infer.einsum(
            "kn,nm,g->gkm", a, b, groups, name="grouped_matmul", operands=("a", "b", "the groups of accumulate_into")
        ),
        total_layout,
    )

    def local_options(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"first": total_layout.local_slices(shape, rank)[0].start}

    return Sharding(total_layout, shape, lambda grad: (None,) * 4, local_options)


def _inference(*tensors: Tensor | None, **options: Any) -> Tensor:
    """The output alone, for `Op.inference`: nothing is saved for backward."""
    return function.forward(*tensors, keep=False, **options)[0]  # type: ignore[arg-type]  # a, b and offsets: not None


GROUPED_MATMUL = Op(
    "grouped_matmul",
    function.forward,
    function.backward,
    _rule,
    output_dtype,
    inference=_inference,
    weights=(1, 3),
    epilogue_backward=function.epilogue_backward,
)
ACCUMULATE = Op("grouped_matmul_accumulate", function.accumulate, lambda *_, **__: (None,) * 4, _rule_of_accumulation)
