"""Kernels for activation(gate) * up, and for an activation alone: one pass forward and one backward.

A program computes BLOCK_I neighbouring elements of one row. Rows are contiguous, with any stride between rows; tensors
which are contiguous throughout are taken as a single row.
"""

import triton
import triton.language as tl

SILU: tl.constexpr = tl.constexpr(0)
GELU: tl.constexpr = tl.constexpr(1)
GELU_TANH: tl.constexpr = tl.constexpr(2)
ROOT_HALF: tl.constexpr = tl.constexpr(0.5**0.5)
INVERSE_ROOT_TAU: tl.constexpr = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 * pi)
TANH_SLOPE: tl.constexpr = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
TANH_CUBE: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def gate_factor(x, ACTIVATION: tl.constexpr):
    """The factor s for which the activation is x * s, in float32."""
    if ACTIVATION == GELU:
        return 0.5 * (1.0 + tl.erf(x * ROOT_HALF))
    elif ACTIVATION == GELU_TANH:
        return tl.sigmoid((x + x * x * x * TANH_CUBE) * TANH_SLOPE)  # (1 + tanh(u)) / 2 = sigmoid(2 * u)
    else:
        return tl.sigmoid(x)


@triton.jit
def slope(x, s, ACTIVATION: tl.constexpr):
    """The derivative of the activation at x, given s = gate_factor(x)."""
    if ACTIVATION == GELU:
        return s + x * INVERSE_ROOT_TAU * tl.exp(-0.5 * x * x)
    elif ACTIVATION == GELU_TANH:
        return s + x * s * (1.0 - s) * TANH_SLOPE * (1.0 + x * x * (3.0 * TANH_CUBE))
    else:
        return s + x * s * (1.0 - s)


@triton.jit
def tile(I, BLOCK_I: tl.constexpr):
    """This program's row and columns, int64, among rows of I elements."""
    across = tl.cdiv(I, BLOCK_I)
    program = tl.program_id(0).to(tl.int64)
    return program // across, program % across * BLOCK_I + tl.arange(0, BLOCK_I)


@triton.jit
def forward(
    gate_ptr, up_ptr, y_ptr, I, stride_gn, stride_un, ACTIVATION: tl.constexpr, BLOCK_I: tl.constexpr
):  # fmt: skip
    """y = activation(gate) * up, or activation(gate) without up, rounded once."""
    row, cols = tile(I, BLOCK_I)
    in_row = cols < I
    gate = tl.load(gate_ptr + row * stride_gn + cols, mask=in_row, other=0.0).to(tl.float32)
    y = gate * gate_factor(gate, ACTIVATION)
    if up_ptr is not None:
        y *= tl.load(up_ptr + row * stride_un + cols, mask=in_row, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * I + cols, y.to(y_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def backward(
    grad_ptr, gate_ptr, up_ptr,
    dgate_ptr, dup_ptr,
    I, stride_dn, stride_gn, stride_un,
    ACTIVATION: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """dgate = grad * up * slope(gate), dup = grad * activation(gate), with the activation recomputed from gate."""
    row, cols = tile(I, BLOCK_I)
    in_row = cols < I
    grad = tl.load(grad_ptr + row * stride_dn + cols, mask=in_row, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gn + cols, mask=in_row, other=0.0).to(tl.float32)
    s = gate_factor(gate, ACTIVATION)
    if dup_ptr is not None:
        dup = grad * gate * s
        tl.store(dup_ptr + row * I + cols, dup.to(dup_ptr.dtype.element_ty), mask=in_row)
    if dgate_ptr is not None:
        if up_ptr is not None:
            grad *= tl.load(up_ptr + row * stride_un + cols, mask=in_row, other=0.0).to(tl.float32)
        dgate = grad * slope(gate, s, ACTIVATION)
        tl.store(dgate_ptr + row * I + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=in_row)
