"""What products are given that does not go together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks import WIDE, check_floats
from .reference import ACTIVATIONS

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def check_activation_name(op: str, activation: str | None) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"{op}: activation is {activation!r}; give one of {', '.join(map(repr, ACTIVATIONS))}, or None"
        )


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
    """Raises ValueError, with the values and the remedy."""
    of_a, of_b = tuple(a.shape), tuple(b.shape)
    if len(of_a) < 2 or len(of_b) < 2 or of_a[-1] != of_b[-2]:
        raise ValueError(
            f"matmul takes a [..., M, K] and b [K, N] or [..., K, N], got {of_a} and {of_b}; the inner sizes are one, "
            f"{of_a[-1:]} and {of_b[-2:-1]}: transpose a factor with .mT where that is meant"
        )
    if len(of_b) > 2 and of_a[:-2] != of_b[:-2]:
        raise ValueError(
            f"matmul takes factors with the same leading dims, or b without any, got {of_a} and {of_b}; expand one"
        )
    check_dtypes("matmul", a, b)
    check_activation_name("matmul", activation)
    out = (*of_a[:-1], of_b[-1])
    if bias is not None and tuple(bias.shape) != out[-1:]:
        raise ValueError(f"matmul takes a bias of shape {out[-1:]}, got {tuple(bias.shape)}; expand or transpose it")
    check_residual("matmul", residual, out)
    check_out_dtype("matmul", out_dtype)
    check_bias_dtype("matmul", bias, a, out_dtype)
    check_no_gradient("matmul", a, b, a_scale, b_scale)
    one = len(of_b) == 2
    check_scale("matmul", "a_scale", a_scale, a, ((), out[:-1]) if one else ((),), "row of a")
    check_scale("matmul", "b_scale", b_scale, b, ((), out[-1:]) if one else ((),), "column of b")


def check_residual(op: str, residual: Tensor | None, out: tuple[int, ...]) -> None:
    """Raises ValueError for one that does not broadcast, or is none of floats."""
    if residual is None:
        return
    if not _broadcasts(tuple(residual.shape), out):
        raise ValueError(
            f"{op}: a residual of shape {tuple(residual.shape)} does not broadcast to the output, {out}; give its dims the "
            f"output's sizes, or 1: with reshape, unsqueeze or transpose"
        )
    check_floats(op, ("the residual",), residual)


def check_out_dtype(op: str, out_dtype: torch.dtype | None) -> None:
    if out_dtype is not None and out_dtype not in WIDE:
        raise ValueError(f"{op}: out_dtype is {out_dtype}; give one of {', '.join(map(str, WIDE))}")


def check_bias_dtype(op: str, bias: Tensor | None, factor: Tensor, out_dtype: torch.dtype | None = None) -> None:
    """Raises ValueError for a bias that has neither the factors' dtype nor the output's; beside 8 bits for one that is none of floats."""
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
    """Raises ValueError for factors of two dtypes, but for two of 8 bits, and for those that are none of floats."""
    if not _alike(a, b) and not (a.dtype in EIGHT_BITS and b.dtype in EIGHT_BITS):
        raise _cannot_be_multiplied(op, a, b)


def check_wide(op: str, a: Tensor, *others: Tensor) -> None:
    """Raises ValueError for factors of two dtypes, and for those that are none of floats of 16 bits or more: there are no scales."""
    for b in others:
        if _alike(a, b):
            continue
        if a.dtype in EIGHT_BITS and b.dtype in EIGHT_BITS:
            raise ValueError(
                f"{op}: factors of {a.dtype} and {b.dtype} have scales, which {op} does not take; call matmul with a_scale and "
                f"b_scale, or cast both with .to()"
            )
        raise _cannot_be_multiplied(op, a, b)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.dtype in WIDE


def _cannot_be_multiplied(op: str, a: Tensor, b: Tensor) -> ValueError:
    return ValueError(
        f"{op}: factors of {a.dtype} and {b.dtype} cannot be multiplied; cast one with .to(), to one of "
        f"{', '.join(map(str, WIDE))}"
    )


def check_no_gradient(op: str, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> None:
    """Raises ValueError where a gradient would be of an 8-bit factor, or of a scale: there is none."""
    if a.dtype.itemsize > 1 or not torch.is_grad_enabled():
        return
    for name, each in (("a", a), ("b", b), ("a_scale", a_scale), ("b_scale", b_scale)):
        if each is not None and each.requires_grad:
            raise ValueError(
                f"{op}: {name} needs a gradient, and factors of 8 bits and their scales have none; detach() it, or multiply in "
                f"16 bits"
            )


def check_scale(
    op: str, name: str, scale: Tensor | None, factor: Tensor, shapes: tuple[tuple[int, ...], ...], what: str
) -> None:
    """shapes: which it may have. what: that has a number each, where it has several."""
    if scale is None:
        return
    if tuple(scale.shape) not in shapes or scale.dtype != torch.float32 or factor.dtype not in EIGHT_BITS:
        raise ValueError(
            f"{op}: {name} is {scale.dtype} of shape {tuple(scale.shape)}, of a factor of {factor.dtype}; for an 8-bit factor "
            f"give float32 of shape {' or '.join(map(str, shapes))}: one number, or one for each {what}"
        )


def check_accumulation(a: Tensor, b: Tensor, into: Tensor, *others: object) -> None:
    """Raises ValueError for what cannot be added in place. others: what may not be given beside it, or as it is by default."""
    if a.dtype.itemsize == 1:
        raise ValueError(
            f"matmul: accumulate_into takes factors of 16 bits at least, got {a.dtype}; cast them with .to()"
        )
    out, wanted = (*a.shape[:-1], b.shape[-1]), torch.promote_types(a.dtype, torch.float32)
    if tuple(into.shape) != tuple(out) or into.dtype not in (wanted, a.dtype) or b.ndim != 2:
        raise ValueError(
            f"matmul: accumulate_into is {into.dtype} of shape {tuple(into.shape)}, for factors of {a.dtype} of shapes "
            f"{tuple(a.shape)} and {tuple(b.shape)}; give {wanted} of shape {tuple(out)}, and b of two dims"
        )
    if any(each not in (None, 1.0) for each in others if not isinstance(each, Tensor)) or any(
        isinstance(each, Tensor) for each in others
    ):
        raise ValueError(
            "matmul: beside accumulate_into there is no bias, residual, scale, activation, alpha, beta or out_dtype; apply "
            "them to the sum when it is complete"
        )
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or into.requires_grad):
        raise ValueError("matmul: accumulate_into records no gradient; call it under torch.no_grad()")


def check_apart(op: str, into: Tensor) -> None:
    """Raises ValueError for a sum of which several elements are one in memory: each would be added to the others."""
    if any(step == 0 and size > 1 for step, size in zip(into.stride(), into.shape, strict=True)):
        raise _no_room(op, into, "elements of it are one in memory")


def rows_in_place(op: str, into: Tensor) -> Tensor:
    """[..., M] -> [N, M], the same memory. Raises ValueError where no view is that, and as `check_apart`."""
    check_apart(op, into)
    if into.ndim == 2:
        return into
    try:
        return into.view(math.prod(into.shape[:-1]), into.shape[-1])
    except RuntimeError:
        raise _no_room(op, into, "no one stride reaches its rows") from None


def _no_room(op: str, into: Tensor, why: str) -> ValueError:
    return ValueError(
        f"{op}: accumulate_into of shape {tuple(into.shape)} has strides {into.stride()}: {why}; give it contiguous"
    )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(to), strict=False)
    )
