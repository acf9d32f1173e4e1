"""Forward and backward of `grouped_matmul` on local tensors, and the checks of the arguments.

Each product is a custom op (`_rows_by_group`, `_weights_by_group`), because the ends of the groups are unknown while
tracing. Inside the op, Triton kernels compute on a GPU and in Triton's interpreter. Plain torch
(`_plain_rows_by_group`, `_plain_weights_by_group`) defines the result. Plain torch computes on a CPU, for float64
tensors, and for 8-bit factors which Triton cannot multiply on this chip. The host then reads the offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import WIDE, can_read, use_triton
from ..dispatch.op import Tensors
from ..launching.launched import launched
from ..matmul import reference as matmul
from ..matmul.checks import (
    check_activation_name,
    check_bias_dtype,
    check_dtypes,
    check_no_gradient,
    check_no_overlap,
    check_out_dtype,
    check_residual,
    check_scale,
)
from ..matmul.function import compiles

OP = "grouped_matmul"  # in error messages


def forward(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    *,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    first: int = 0,
    adds: bool = True,
    keep: bool = True,
) -> tuple[Tensor, Tensors]:
    """The rows of each group times the group's matrix, see `_plain_rows_by_group`; rows in no group of b are zero.

    first: the global number of b's first group.
    adds: whether this rank adds bias and residual. False if ranks' outputs are summed and another rank adds both.
    keep: whether to save z for backward.

    Saved for backward: a, b, offsets, the residual's shape and, with an activation, the pre-activation z; for relu
    without a residual, the output instead of z.
    """
    addends = (bias, residual) if adds else (None, None)
    out = torch.zeros((a.shape[0], b.shape[-1]), dtype=out_dtype or a.dtype, device=a.device)
    saves_output = activation == "relu" and residual is None
    z = torch.empty_like(out) if keep and activation is not None and not saves_output else None
    _rows_by_group(a, b, offsets, *addends, a_scale, b_scale, out, z, activation, alpha, beta, first)
    # Backward needs only the residual's shape and dtype: save a single element, expanded.
    residual_shape = None if residual is None else residual.new_empty(()).expand(residual.shape)
    return out, (a, b, offsets, out if saves_output else z, residual_shape)


def epilogue_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], **options: Any) -> Tensors:
    """Returns dz = grad * act'(z), and dresidual = beta * grad with zeros in the rows after the last group.

    dz has the dtype of a; for an a of 8 bits, the dtype of grad. dresidual is None if not needed.
    z: the pre-activation; for relu without a residual, the output, which has the same derivative.
    """
    a, _, offsets, z, residual = saved
    assert a is not None and offsets is not None, "forward saves the operands"
    dresidual = None
    if needed[4] and residual is not None:
        dresidual = _zero_behind_groups(grad, offsets).mul_(options.get("beta", 1.0))
        dresidual = dresidual.sum_to_size(residual.shape).to(residual.dtype)
    dz = grad if z is None else matmul.multiply_by_derivative(grad, z, options.get("activation"))
    return dz if a.dtype.itemsize == 1 else dz.to(a.dtype), dresidual


def _zero_behind_groups(grad: Tensor, offsets: Tensor) -> Tensor:
    """Return grad with zeros in the rows after the last group. The host does not wait for the offsets."""
    if len(offsets) == 0:
        return torch.zeros_like(grad)
    behind = torch.arange(len(grad), device=grad.device) >= offsets[-1]
    return grad.masked_fill(behind[:, None], 0)


def backward(
    saved: Tensors,
    grads: Tensors,
    needed: Sequence[bool],
    *,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    first: int = 0,
    adds: bool = True,
) -> Tensors:
    """The gradients of a, b, bias and residual; None for offsets and scales.

    For each group g: da[rows] = alpha * dz[rows] @ b[g].T, db[g] = alpha * a[rows].T @ dz[rows],
    dbias[g] = dz[rows].sum(0).

    grads: (dz, dresidual), from `epilogue_backward`.
    """
    a, b, offsets = saved[:3]
    dz, dresidual = grads
    assert a is not None and b is not None and offsets is not None and dz is not None, "forward saves the operands"
    da = db = dbias = None
    if needed[0]:
        da = torch.zeros(a.shape, dtype=a.dtype, device=a.device)
        _rows_by_group(dz, b.mT, offsets, None, None, None, None, da, None, None, alpha, 1.0, first)
    if needed[1]:
        db = torch.empty(b.shape, dtype=b.dtype, device=b.device)
        _weights_by_group(a, dz, offsets, db, alpha, first, False)
    if needed[3]:
        dbias = torch.empty((len(b), 1, b.shape[-1]), dtype=dz.dtype, device=b.device)
        _weights_by_group(dz.new_ones(len(dz), 1), dz, offsets, dbias, 1.0, first, False)
        dbias = dbias.squeeze(1)
    return da, db, None, dbias, dresidual, None, None


def accumulate(a: Tensor, b: Tensor, offsets: Tensor, total: Tensor, *, first: int = 0) -> tuple[Tensor, Tensors]:
    """total[g] += a[:, rows] @ b[rows] for each group g. a: [K, N]. b: [N, M]. total: [G, K, M].

    Raises ValueError if elements of `total` share memory.
    """
    check_no_overlap("grouped_matmul", total)
    _weights_by_group(a.mT, b, offsets, total, 1.0, first, True)
    return total, ()


@launched(
    "grouped_matmul(Tensor a, Tensor b, Tensor offsets, Tensor? bias, Tensor? residual, Tensor? a_scale, Tensor? "
    "b_scale, Tensor(a!) out, Tensor(b!)? z, str? activation, float alpha, float beta, int first)"
)
def _rows_by_group(a: Tensor, b: Tensor, *operands: Any) -> None:
    if use_triton(a) and (a.dtype.itemsize > 1 or compiles(a, b)):
        from . import launch  # imports triton, which a CPU run may not have

        launch.forward(a, b, *operands)
    else:
        _plain_rows_by_group(a, b, *operands)


@launched(
    "grouped_matmul_weights(Tensor a, Tensor grad, Tensor offsets, Tensor(a!) out, float alpha, int first, bool "
    "accumulate)"
)
def _weights_by_group(a: Tensor, *operands: Any) -> None:
    if use_triton(a):
        from . import launch

        launch.weights(a, *operands)
    else:
        _plain_weights_by_group(a, *operands)


def _plain_rows_by_group(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    out: Tensor,
    z: Tensor | None,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    first: int = 0,
) -> None:
    """a [N, K], b [G, K, M] -> out [N, M]: the rows of group first + g times b[g], with epilogue.

    The epilogue is the same as in `matmul.reference`.
    offsets: int32, the end of every global group. b and bias [G, M] have groups first to first + G - 1; in out, the
        rows of all other groups are not written.
    residual: broadcast to out. a_scale: a number or [N]. b_scale: a number, [G] or [G, M].
    z: receives the pre-activation; None to store none.
    """
    epilogue = (bias, residual, a_scale, b_scale, activation)
    is_plain_product = alpha == 1 and out.dtype == a.dtype and all(each is None for each in epilogue)
    residual = None if residual is None else residual.expand(out.shape)
    for g, rows in enumerate(_groups(offsets, first, len(b))):
        if is_plain_product:
            torch.mm(a[rows], b[g], out=out[rows])
            continue
        out[rows], group_z = matmul.product(
            a[rows], b[g], None if bias is None else bias[g], None if residual is None else residual[rows],
            _scale_at(a_scale, rows), _scale_at(b_scale, g),
            activation=activation, alpha=alpha, beta=beta, out_dtype=out.dtype, keep_z=z is not None,
        )  # fmt: skip
        if z is not None and group_z is not None:
            z[rows] = group_z


def _scale_at(scale: Tensor | None, index: slice | int) -> Tensor | None:
    """The scale of the rows, or of the group, at `index`. A single number is the scale of all rows or groups."""
    return scale if scale is None or scale.ndim == 0 else scale[index]


def _plain_weights_by_group(
    a: Tensor,
    grad: Tensor,
    offsets: Tensor,
    out: Tensor,
    alpha: float = 1.0,
    first: int = 0,
    accumulate: bool = False,
) -> None:
    """a [N, K], grad [N, M] -> out [G, K, M]: out[g] = alpha * a[rows].T @ grad[rows], for the rows of group first + g.

    accumulate: add a[rows].T @ grad[rows] to out[g] instead; alpha must be 1.
    """
    for g, rows in enumerate(_groups(offsets, first, len(out))):
        if accumulate:
            matmul.accumulate(a[rows].mT, grad[rows], out[g])
        else:
            torch.addmm(out[g], a[rows].mT, grad[rows], beta=0, alpha=alpha, out=out[g])


def _groups(offsets: Tensor, first: int, count: int) -> Iterator[slice]:
    """The rows of each of `count` groups from `first` on. The host reads the offsets."""
    ends: list[int] = offsets.tolist()
    for g in range(first, first + count):
        yield slice(ends[g - 1] if g else 0, ends[g])


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
    check_activation_name(OP, "activation", activation)
    check_residual(OP, residual, (rows, columns))
    check_out_dtype(OP, out_dtype)
    check_dtypes(OP, a, b)
    check_bias_dtype(OP, bias, a, out_dtype)
    check_no_gradient(OP, a, b, a_scale, b_scale)
    check_scale(OP, "a_scale", a_scale, a, ((), (rows,)), "row of a")
    check_scale(OP, "b_scale", b_scale, b, ((), (groups,), (groups, columns)), "group, or each column of a group")
    _check_offsets(offsets, rows)


def check_accumulation(a: Tensor, b: Tensor, offsets: Tensor, total: Tensor, *options: object) -> None:
    """Raises ValueError for arguments which do not fit accumulation into `total`.

    options: the arguments of `grouped_matmul` which accumulation does not take; each must be None or 1.0.
    """
    shapes = tuple(tuple(each.shape) for each in (a, b, total, offsets))
    wanted = torch.promote_types(a.dtype, torch.float32) if a.dtype in WIDE else torch.float32
    if (
        [*map(len, shapes)] != [2, 2, 3, 1]
        or shapes[0][1] != shapes[1][0]
        or shapes[2] != (*shapes[3], shapes[0][0], shapes[1][1])
        or total.dtype not in (wanted, a.dtype)
    ):
        raise ValueError(
            f"{OP}: with accumulate_into [G, K, M], in {wanted} for factors of {a.dtype}, give a [K, N], b [N, M] and "
            f"offsets [G]; got accumulate_into {shapes[2]} in {total.dtype}, a {shapes[0]}, b {shapes[1]} and offsets "
            f"{shapes[3]}"
        )
    if any(isinstance(each, Tensor) or each not in (None, 1.0) for each in options):
        raise ValueError(
            f"{OP}: beside accumulate_into there is no bias, residual, scale, activation, alpha, beta or out_dtype; "
            f"apply them to the sum when it is complete"
        )
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or total.requires_grad):
        raise ValueError(f"{OP}: accumulate_into records no gradient; call it under torch.no_grad()")
    check_dtypes(OP, a, b)
    if a.dtype.itemsize == 1:
        raise ValueError(
            f"{OP}: accumulate_into takes factors of 16 bits at least, got {a.dtype}; cast them with .to()"
        )
    _check_offsets(offsets, shapes[1][0])


def _check_offsets(offsets: Tensor, rows: int) -> None:
    """Raises ValueError for offsets which are not int32 and, on a CPU, for offsets which decrease or exceed `rows`."""
    if offsets.dtype != torch.int32:
        raise ValueError(f"{OP} takes offsets in torch.int32, got {offsets.dtype}; cast them with .to()")
    if type(offsets) is Tensor and can_read(offsets):
        ends = [0, *offsets.tolist()]
        if ends != sorted(ends) or ends[-1] > rows:
            raise ValueError(
                f"{OP}: the groups end at {ends[1:]}, of {rows} rows; give offsets that never decrease, to at most "
                f"{rows}: the cumulative sum of the groups' sizes"
            )
