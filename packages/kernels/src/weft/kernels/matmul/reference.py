"""Products and their epilogues by torch's own functions: the CPU path, the kernels' definition, and on a GPU cuBLAS.

Products of 8-bit factors go by `torch._scaled_mm`, torch's own GEMM, on chips with 8-bit tensor cores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dispatch.backend import chip_of, multiplies, on_cpu
from ..launching.launched import launched

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16  # bytes: `torch._scaled_mm` needs sizes, strides and addresses in multiples of this


def can_multiply(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether `torch._scaled_mm` can multiply a [M, K] and b [K, N].

    Conditions: a and b are contiguous along K, and not both are in e5m2. With scales for each row or column, also: the
    output is bfloat16, and b is in e4m3.
    """
    if not (a.is_cuda and torch.version.hip is None and a.ndim == b.ndim == 2 and a.numel() and b.numel()):
        return False
    if not multiplies(chip_of(a.device)[0], E4M3) or (a.stride(1), b.stride(0)) != (1, 1):
        return False
    if any(size % ALIGNMENT for size in (*b.shape, a.stride(0), b.stride(1))):
        return False
    if not ({a.dtype, b.dtype} <= {E4M3, E5M2} and E4M3 in (a.dtype, b.dtype)):
        return False
    if _has_row_scales(a_scale, b_scale):
        return dtype == torch.bfloat16 and b.dtype == E4M3
    return dtype in (torch.bfloat16, torch.float16, torch.float32)


def scaled_product(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(a * a_scale) @ (b * b_scale), for factors which `can_multiply` accepts; summed in float32 and rounded once."""
    out = torch.empty((len(a), b.shape[1]), dtype=dtype, device=a.device)
    _launch(a, b, a_scale, b_scale, out)
    return out


@launched("scaled_product(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor(a!) out)")
def _launch(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, out: Tensor) -> None:
    """Writes the product into out. A custom op, because `_align` reads addresses, which a trace does not know."""
    unit = torch.ones((), device=a.device)
    scales = [unit if each is None else each for each in (a_scale, b_scale)]
    if _has_row_scales(a_scale, b_scale):
        shapes = (len(a), 1), (1, b.shape[1])
        scales = [
            (each if each.numel() == 1 else each.reshape(shape)).expand(shape).contiguous()
            for each, shape in zip(scales, shapes, strict=True)
        ]
    torch._scaled_mm(
        _align(a), _align(b.mT).mT,
        scale_a=scales[0], scale_b=scales[1], out_dtype=out.dtype, use_fast_accum=False, out=out,
    )  # fmt: skip


def _has_row_scales(*scales: Tensor | None) -> bool:
    return any(each is not None and each.numel() > 1 for each in scales)


def _align(x: Tensor) -> Tensor:
    """x, copied if the address of x is no multiple of ALIGNMENT."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "relu2")


def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    *,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    keep_z: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(act(z) + beta * residual, z or None), with z = alpha * (a * a_scale) @ (b * b_scale) + bias.

    a: [M, K] or [B, M, K]. b: [K, N] or [B, K, N]. bias: [N]. residual: broadcast to the output.
    a_scale: a number or [M]. b_scale: a number or [N]. keep_z: whether to return z.
    """
    dtype = out_dtype or a.dtype
    if bias is not None and alpha == 1 and a_scale is None and b_scale is None and a.dtype == dtype and b.ndim == 2:
        z = F.linear(a, b.mT, bias)
    else:
        if a.dtype.itemsize == 1 and can_multiply(a, b, a_scale, b_scale, dtype):
            z = scaled_product(a, b, a_scale, b_scale, dtype)
        elif a.dtype.itemsize == 1:  # products of 8 bits are exact in float32
            z = _dequantize(a, a_scale, -1) @ _dequantize(b, b_scale, -2)
        else:
            z = _wide_product(_multiply_by_scale(a, a_scale, -1), _multiply_by_scale(b, b_scale, -2), dtype)
        z = z if alpha == 1 else z * alpha
        z = (z if bias is None else z + bias).to(dtype)
    out = z if activation is None else activate(z, activation)
    if residual is not None:
        out = torch.add(out, residual.to(dtype), alpha=beta)
    return out, z if keep_z else None


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`. If `dtype` is wider than the factors', sums are not rounded to the factors' dtype first."""
    if a.dtype == dtype:
        return a @ b
    if torch.promote_types(a.dtype, dtype) != dtype or on_cpu(a) or a.dtype == torch.float64:
        wide = torch.promote_types(a.dtype, dtype)
        return (a.to(wide) @ b.to(wide)).to(dtype)
    return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=dtype)


def accumulate(a: Tensor, b: Tensor, total: Tensor) -> None:
    """total += a @ b, computed in the dtype of total; a and b have two dims."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    elif on_cpu(a):
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def activate(z: Tensor, activation: str) -> Tensor:
    """The activation of z, by a name of ACTIVATIONS. relu2 is relu squared (So et al. 2021)."""
    match activation:
        case "gelu":
            return F.gelu(z)
        case "gelu_tanh":
            return F.gelu(z, approximate="tanh")
        case "silu":
            return F.silu(z)
        case "relu":
            return F.relu(z)
    assert activation == "relu2", "check_activation_name was called"
    return F.relu(z).square_()


def multiply_by_derivative(grad: Tensor, z: Tensor, activation: str | None) -> Tensor:
    """Return grad * act'(z): in a single pass by aten's backward of the activation, except for relu2.

    For relu, z may be the output instead, as both are above 0 in the same places.
    """
    if activation is None:
        return grad
    if activation == "relu2":
        return F.relu(z).mul_(grad).mul_(2)
    gradient: Tensor
    match activation:
        case "gelu":
            gradient = torch.ops.aten.gelu_backward(grad, z)
        case "gelu_tanh":
            gradient = torch.ops.aten.gelu_backward(grad, z, approximate="tanh")
        case "silu":
            gradient = torch.ops.aten.silu_backward(grad, z)
        case _:
            assert activation == "relu", "check_activation_name was called"
            gradient = torch.ops.aten.threshold_backward(grad, z, 0)
    return gradient


def flatten_to_rows(x: Tensor) -> Tensor:
    """Flatten the leading dims: [..., M] -> [N, M]."""
    if x.ndim == 2:
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # not -1, which is ambiguous for an empty x


def restore_leading_dims(rows: Tensor, like: Tensor) -> Tensor:
    """The reverse of `flatten_to_rows`: [N, M] -> [..., M], with the leading dims of `like`."""
    return rows if like.ndim == 2 else rows.view(*like.shape[:-1], rows.shape[-1])


def _dequantize(x: Tensor, scale: Tensor | None, dim: int) -> Tensor:
    """x * scale in float32; see `_multiply_by_scale`."""
    return _multiply_by_scale(x.to(torch.float32), scale, dim)


def _multiply_by_scale(x: Tensor, scale: Tensor | None, dim: int) -> Tensor:
    """x * scale in x's dtype. scale: a number, or a tensor which broadcasts to x after `unsqueeze(dim)`."""
    if scale is None:
        return x
    return x * (scale.reshape(()) if scale.numel() == 1 else scale.unsqueeze(dim)).to(x.dtype)
