"""Checks of the arguments of products: shapes, dtypes, scales and strides."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..dispatch.arguments import check_choice, check_number
from ..dispatch.backend import WIDE, check_floats
from .reference import ACTIVATIONS

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def check_activation_name(op: str, name: str, activation: str | None) -> None:
    """Raises ValueError unless the option `name` is None or in ACTIVATIONS. op: the op's name, for messages."""
    check_choice(op, name, activation, ACTIVATIONS, or_none=True)


def check_factors(op: str, alpha: float, beta: float) -> None:
    """Raises ValueError unless the factors of the product and of the residual are finite numbers."""
    if type(alpha) is type(beta) is float and alpha == beta == 1:  # the defaults
        return
    check_number(op, "alpha", alpha)
    check_number(op, "beta", beta)


def check_matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
) -> None:
    """Raises ValueError for mismatched arguments of `matmul` without accumulate_into."""
    a_shape, b_shape = tuple(a.shape), tuple(b.shape)
    if len(a_shape) < 2 or len(b_shape) < 2 or a_shape[-1] != b_shape[-2]:
        raise ValueError(
            f"matmul takes a [..., M, K] and b [K, N] or [..., K, N], got {a_shape} and {b_shape}; both sizes K must "
            f"be equal, and are {a_shape[-1:]} and {b_shape[-2:-1]}: transpose a factor with .mT where this is meant"
        )
    if len(b_shape) > 2 and a_shape[:-2] != b_shape[:-2]:
        raise ValueError(
            f"matmul takes factors with the same leading dims, or b without any, got {a_shape} and {b_shape}; expand "
            f"the leading dims of one factor"
        )
    check_dtypes("matmul", a, b)
    check_activation_name("matmul", "activation", activation)
    out = (*a_shape[:-1], b_shape[-1])
    if bias is not None and tuple(bias.shape) != out[-1:]:
        raise ValueError(f"matmul takes a bias of shape {out[-1:]}, got {tuple(bias.shape)}; expand or transpose it")
    check_residual("matmul", residual, out)
    check_out_dtype("matmul", out_dtype)
    check_bias_dtype("matmul", bias, a, out_dtype)
    check_no_gradient("matmul", a, b, a_scale, b_scale)
    is_one_product = len(b_shape) == 2
    check_scale("matmul", "a_scale", a_scale, a, ((), out[:-1]) if is_one_product else ((),), "row of a")
    check_scale("matmul", "b_scale", b_scale, b, ((), out[-1:]) if is_one_product else ((),), "column of b")


def check_residual(op: str, residual: Tensor | None, out: tuple[int, ...]) -> None:
    """Raises ValueError for a residual which does not broadcast to shape `out`, or whose dtype is not floating."""
    if residual is None:
        return
    if not _broadcasts(tuple(residual.shape), out):
        raise ValueError(
            f"{op}: a residual of shape {tuple(residual.shape)} does not broadcast to the output, {out}; give its dims "
            f"the output's sizes, or 1: with reshape, unsqueeze or transpose"
        )
    check_floats(op, ("the residual",), residual)


def check_out_dtype(op: str, out_dtype: torch.dtype | None) -> None:
    """Raises ValueError unless out_dtype is None or floating of 16 bits or more."""
    if out_dtype is not None and out_dtype not in WIDE:
        raise ValueError(f"{op}: out_dtype is {out_dtype}; give one of {', '.join(map(str, WIDE))}")


def check_bias_dtype(op: str, bias: Tensor | None, factor: Tensor, out_dtype: torch.dtype | None = None) -> None:
    """Raises ValueError unless the bias has the factor's dtype or out_dtype.

    Beside 8-bit factors, any floating dtype of 16 bits or more is allowed.
    """
    if bias is None or (bias.dtype in WIDE and bias.dtype in (factor.dtype, out_dtype)):
        return
    if factor.dtype in EIGHT_BITS:
        check_floats(op, ("the bias",), bias)
        return
    dtypes = " or ".join(str(each) for each in dict.fromkeys((factor.dtype, out_dtype)) if each is not None)
    raise ValueError(
        f"{op}: the bias is {bias.dtype} beside factors of {factor.dtype}; cast it with .to(), to {dtypes}"
    )


def check_dtypes(op: str, a: Tensor, b: Tensor) -> None:
    """Raises ValueError unless both factors have the same floating dtype, or 8-bit dtypes, which may differ."""
    if not _have_one_wide_dtype(a, b) and not (a.dtype in EIGHT_BITS and b.dtype in EIGHT_BITS):
        raise _cannot_be_multiplied(op, a, b)


def check_wide(op: str, a: Tensor, *factors: Tensor) -> None:
    """Raises ValueError unless all factors have the same floating dtype of 16 bits or more.

    For ops without scale arguments, such as `linear`: these refuse 8-bit factors.
    """
    for b in factors:
        if _have_one_wide_dtype(a, b):
            continue
        if a.dtype in EIGHT_BITS and b.dtype in EIGHT_BITS:
            raise ValueError(
                f"{op}: factors of {a.dtype} and {b.dtype} have scales, which {op} does not take; call matmul with "
                f"a_scale and b_scale, or cast both with .to()"
            )
        raise _cannot_be_multiplied(op, a, b)


def _have_one_wide_dtype(a: Tensor, b: Tensor) -> bool:
    """Whether both factors have the same floating dtype of 16 bits or more."""
    return a.dtype == b.dtype and a.dtype in WIDE


def _cannot_be_multiplied(op: str, a: Tensor, b: Tensor) -> ValueError:
    return ValueError(
        f"{op}: factors of {a.dtype} and {b.dtype} cannot be multiplied; cast one with .to(), to one of "
        f"{', '.join(map(str, WIDE))}"
    )


def check_no_gradient(op: str, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> None:
    """Raises ValueError where an 8-bit factor or a scale requires a gradient, which products do not compute."""
    if a.dtype.itemsize > 1 or not torch.is_grad_enabled():
        return
    for name, each in (("a", a), ("b", b), ("a_scale", a_scale), ("b_scale", b_scale)):
        if each is not None and each.requires_grad:
            raise ValueError(
                f"{op}: {name} needs a gradient, and factors of 8 bits and their scales have none; detach() it, or "
                f"multiply in 16 bits"
            )


def check_scale(
    op: str, name: str, scale: Tensor | None, factor: Tensor, shapes: tuple[tuple[int, ...], ...], what: str
) -> None:
    """Raises ValueError unless the scale is float32, its shape is in `shapes`, and the factor has 8 bits.

    what: the part of the factor with a scale of its own, as "row of a", for the message.
    """
    if scale is None:
        return
    if tuple(scale.shape) not in shapes or scale.dtype != torch.float32 or factor.dtype not in EIGHT_BITS:
        raise ValueError(
            f"{op}: {name} is {scale.dtype} of shape {tuple(scale.shape)}, of a factor of {factor.dtype}; for an 8-bit "
            f"factor give float32 of shape {' or '.join(map(str, shapes))}: one number, or one for each {what}"
        )


def check_accumulation(a: Tensor, b: Tensor, total: Tensor, *options: object) -> None:
    """Raises ValueError for arguments which do not fit accumulation into `total`.

    options: the arguments of `matmul` which accumulation does not take; each must be None or 1.0.
    """
    if a.dtype.itemsize == 1:
        raise ValueError(
            f"matmul: accumulate_into takes factors of 16 bits at least, got {a.dtype}; cast them with .to()"
        )
    out, wanted = (*a.shape[:-1], b.shape[-1]), torch.promote_types(a.dtype, torch.float32)
    if tuple(total.shape) != tuple(out) or total.dtype not in (wanted, a.dtype) or b.ndim != 2:
        raise ValueError(
            f"matmul: accumulate_into is {total.dtype} of shape {tuple(total.shape)}, for factors of {a.dtype} of "
            f"shapes {tuple(a.shape)} and {tuple(b.shape)}; give {wanted} of shape {tuple(out)}, and b of two dims"
        )
    if any(each not in (None, 1.0) for each in options if not isinstance(each, Tensor)) or any(
        isinstance(each, Tensor) for each in options
    ):
        raise ValueError(
            "matmul: beside accumulate_into there is no bias, residual, scale, activation, alpha, beta or out_dtype; "
            "apply them to the sum when it is complete"
        )
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or total.requires_grad):
        raise ValueError("matmul: accumulate_into records no gradient; call it under torch.no_grad()")


def check_no_overlap(op: str, total: Tensor) -> None:
    """Raises ValueError where elements of `total`, the op's accumulate_into, share memory: their sums would mix."""
    if any(step == 0 and size > 1 for step, size in zip(total.stride(), total.shape, strict=True)):
        raise _strides_error(op, total, "several elements share their memory")


def rows_in_place(op: str, total: Tensor) -> Tensor:
    """The op's accumulate_into `total` [..., M] as a view [N, M], into which a kernel adds.

    Raises ValueError where no view has this shape, and as `check_no_overlap`.
    """
    check_no_overlap(op, total)
    if total.ndim == 2:
        return total
    try:
        return total.view(math.prod(total.shape[:-1]), total.shape[-1])
    except RuntimeError:
        raise _strides_error(op, total, "no single stride reaches all rows") from None


def _strides_error(op: str, total: Tensor, why: str) -> ValueError:
    return ValueError(
        f"{op}: accumulate_into of shape {tuple(total.shape)} has strides {total.stride()}: {why}; give it contiguous"
    )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a tensor of `shape` broadcasts to shape `to`."""
    return len(shape) <= len(to) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(to), strict=False)
    )
