"""What products are given that does not go together."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import ACTIVATIONS

WIDE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
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
    check_devices("matmul", a, b, bias, residual, a_scale, b_scale)
    one = len(of_b) == 2
    check_scale("matmul", "a_scale", a_scale, a, ((), out[:-1]) if one else ((),), "row of a")
    check_scale("matmul", "b_scale", b_scale, b, ((), out[-1:]) if one else ((),), "column of b")


def check_residual(op: str, residual: Tensor | None, out: tuple[int, ...]) -> None:
    if residual is not None and not _broadcasts(tuple(residual.shape), out):
        raise ValueError(f"{op}: a residual of shape {tuple(residual.shape)} does not broadcast to the output, {out}")


def check_out_dtype(op: str, out_dtype: torch.dtype | None) -> None:
    if out_dtype is not None and out_dtype not in WIDE:
        raise ValueError(f"{op}: out_dtype is {out_dtype}; give one of {', '.join(map(str, WIDE))}")


def check_devices(op: str, *operands: Tensor | None) -> None:
    devices = {str(each.device) for each in operands if each is not None}
    if len(devices) > 1:
        raise ValueError(f"{op}: its operands lie on {' and '.join(sorted(devices))}; move them to one device")


def check_dtypes(op: str, a: Tensor, b: Tensor) -> None:
    """Raises ValueError for factors of two dtypes, but for two of 8 bits, and for those that are none of floats."""
    alike = a.dtype == b.dtype and a.dtype in WIDE
    if not alike and not (a.dtype in EIGHT_BITS and b.dtype in EIGHT_BITS):
        raise ValueError(
            f"{op}: factors of {a.dtype} and {b.dtype} cannot be multiplied; cast one with .to(), to one of "
            f"{', '.join(map(str, WIDE))}"
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
    out = (*a.shape[:-1], b.shape[-1])
    wanted = torch.promote_types(a.dtype, torch.float32) if a.dtype in WIDE else torch.float32
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


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(to), strict=False)
    )
