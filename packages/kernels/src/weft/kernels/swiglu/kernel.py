"""Activations, and gates: an activation times another tensor. One pass each way; nothing but the operands is read.

A program takes BLOCK_I neighbours of one row. Rows are apart by their strides, and contiguous; contiguous tensors are one row.
"""

import triton
import triton.language as tl

SILU: tl.constexpr = tl.constexpr(0)
GELU: tl.constexpr = tl.constexpr(1)
GELU_TANH: tl.constexpr = tl.constexpr(2)
ROOT_HALF: tl.constexpr = tl.constexpr(0.5**0.5)
ROOT_OF_TAU: tl.constexpr = tl.constexpr(0.3989422804014327)  # one over the root of 2 pi
TANH_SLOPE: tl.constexpr = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
TANH_CUBE: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def share(x, ACTIVATION: tl.constexpr):
    """The factor s of the activation x * s, of float32."""
    if ACTIVATION == GELU:
        return 0.5 * (1.0 + tl.erf(x * ROOT_HALF))
    elif ACTIVATION == GELU_TANH:
        return tl.sigmoid((x + x * x * x * TANH_CUBE) * TANH_SLOPE)  # (1 + tanh(u)) / 2 = sigmoid(2 * u)
    else:
        return tl.sigmoid(x)


@triton.jit
def slope(x, s, ACTIVATION: tl.constexpr):
    """The derivative of the activation at x, whose share is s."""
    if ACTIVATION == GELU:
        return s + x * ROOT_OF_TAU * tl.exp(-0.5 * x * x)
    elif ACTIVATION == GELU_TANH:
        return s + x * s * (1.0 - s) * TANH_SLOPE * (1.0 + x * x * (3.0 * TANH_CUBE))
    else:
        return s + x * s * (1.0 - s)


@triton.jit
def tile(I, BLOCK_I: tl.constexpr):
    """This program's row and columns, int64, of rows of I."""
    across = tl.cdiv(I, BLOCK_I)
    program = tl.program_id(0).to(tl.int64)
    return program // across, program % across * BLOCK_I + tl.arange(0, BLOCK_I)


@triton.jit
def forward(
    gate_ptr, up_ptr, y_ptr, I, stride_gn, stride_un, ACTIVATION: tl.constexpr, BLOCK_I: tl.constexpr
):  # fmt: skip
    """y = activation(gate) * up, or the activation alone, rounded once."""
    row, cols = tile(I, BLOCK_I)
    in_row = cols < I
    gate = tl.load(gate_ptr + row * stride_gn + cols, mask=in_row, other=0.0).to(tl.float32)
    y = gate * share(gate, ACTIVATION)
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
    """dgate = grad * up * slope(gate), dup = grad * activation(gate): the activation is computed again."""
    row, cols = tile(I, BLOCK_I)
    in_row = cols < I
    grad = tl.load(grad_ptr + row * stride_dn + cols, mask=in_row, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gn + cols, mask=in_row, other=0.0).to(tl.float32)
    s = share(gate, ACTIVATION)
    if dup_ptr is not None:
        dup = grad * gate * s
        tl.store(dup_ptr + row * I + cols, dup.to(dup_ptr.dtype.element_ty), mask=in_row)
    if dgate_ptr is not None:
        if up_ptr is not None:
            grad *= tl.load(up_ptr + row * stride_un + cols, mask=in_row, other=0.0).to(tl.float32)
        dgate = grad * slope(gate, s, ACTIVATION)
        tl.store(dgate_ptr + row * I + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=in_row)
