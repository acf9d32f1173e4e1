"""Checks of the arguments of grouped_matmul: shapes, dtypes, scales and offsets."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import can_read
from ..checks import WIDE
from ..matmul.checks import (
    check_activation_name,
    check_bias_dtype,
    check_dtypes,
    check_no_gradient,
    check_out_dtype,
    check_residual,
    check_scale,
)

OP = "grouped_matmul"


def check_grouped(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
) -> None:
    """Raises ValueError for mismatched arguments of `grouped_matmul` without accumulate_into."""
    a_shape, b_shape, offsets_shape = (tuple(each.shape) for each in (a, b, offsets))
    if len(a_shape) != 2 or len(b_shape) != 3 or a_shape[1] != b_shape[1] or offsets_shape != b_shape[:1]:
        raise ValueError(
            f"{OP} takes a [N, K], b [G, K, M] and offsets [G], got {a_shape}, {b_shape} and {offsets_shape}; flatten "
            f"the rows of a, stack the matrices of b with their inner dim first, and give where each group ends"
        )
    rows, (groups, _, columns) = a_shape[0], b_shape
    if bias is not None and tuple(bias.shape) != (groups, columns):
        raise ValueError(
            f"{OP} takes a bias of shape {(groups, columns)}, a row for each group, got {tuple(bias.shape)}; expand or "
            f"transpose it"
        )
    check_activation_name(OP, activation)
    check_residual(OP, residual, (rows, columns))
    check_out_dtype(OP, out_dtype)
    check_dtypes(OP, a, b)
    check_bias_dtype(OP, bias, a, out_dtype)
    check_no_gradient(OP, a, b, a_scale, b_scale)
    check_scale(OP, "a_scale", a_scale, a, ((), (rows,)), "row of a")
    check_scale(OP, "b_scale", b_scale, b, ((), (groups,), (groups, columns)), "group, or each column of a group")
    check_offsets(offsets, rows)


def check_accumulation(a: Tensor, b: Tensor, offsets: Tensor, into: Tensor, *options: object) -> None:
    """Raises ValueError for arguments that do not fit accumulation into `into`.

    options: the arguments of `grouped_matmul` that accumulation does not take; each must be None or 1.0.
    """
    shapes = tuple(tuple(each.shape) for each in (a, b, into, offsets))
    wanted = torch.promote_types(a.dtype, torch.float32) if a.dtype in WIDE else torch.float32
    if (
        [*map(len, shapes)] != [2, 2, 3, 1]
        or shapes[0][1] != shapes[1][0]
        or shapes[2] != (*shapes[3], shapes[0][0], shapes[1][1])
        or into.dtype not in (wanted, a.dtype)
    ):
        raise ValueError(
            f"{OP}: with accumulate_into [G, K, M], in {wanted} for factors of {a.dtype}, give a [K, N], b [N, M] and "
            f"offsets [G]; got accumulate_into {shapes[2]} in {into.dtype}, a {shapes[0]}, b {shapes[1]} and offsets "
            f"{shapes[3]}"
        )
    if any(isinstance(each, Tensor) or each not in (None, 1.0) for each in options):
        raise ValueError(
            f"{OP}: beside accumulate_into there is no bias, residual, scale, activation, alpha, beta or out_dtype; "
            f"apply them to the sum when it is complete"
        )
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or into.requires_grad):
        raise ValueError(f"{OP}: accumulate_into records no gradient; call it under torch.no_grad()")
    check_dtypes(OP, a, b)
    if a.dtype.itemsize == 1:
        raise ValueError(
            f"{OP}: accumulate_into takes factors of 16 bits at least, got {a.dtype}; cast them with .to()"
        )
    check_offsets(offsets, shapes[1][0])


def check_offsets(offsets: Tensor, rows: int) -> None:
    """Raises ValueError unless the offsets are int32 and, where the host can read them, rise to at most `rows`."""
    if offsets.dtype != torch.int32:
        raise ValueError(f"{OP} takes offsets in torch.int32, got {offsets.dtype}; cast them with .to()")
    if type(offsets) is Tensor and can_read(offsets):
        ends = [0, *offsets.tolist()]
        if ends != sorted(ends) or ends[-1] > rows:
            raise ValueError(
                f"{OP}: the groups end at {ends[1:]}, of {rows} rows; give offsets that rise, to at most {rows}: "
                f"the cumulative sum of the groups' sizes"
            )
