"""Embedding kernels over this rank's rows of the table. Backward sums in a fixed order, without atomics.

A program computes BLOCK_H columns of one token; in backward, BLOCK_H columns of one row of the table.
"""

import triton
import triton.language as tl


@triton.jit
def forward(tokens_ptr, weight_ptr, y_ptr, rows, H, stride_wv, vocab_start, vocab_size, BLOCK_H: tl.constexpr):
    """y[n] = weight[tokens[n] - vocab_start]; zeros for rows of another rank, NaN for tokens outside the vocabulary."""
    across = tl.cdiv(H, BLOCK_H)
    token = tl.program_id(0).to(tl.int64) // across
    cols = tl.program_id(0) % across * BLOCK_H + tl.arange(0, BLOCK_H)
    in_row = cols < H
    v = tl.load(tokens_ptr + token).to(tl.int64)
    row = v - vocab_start
    held = tl.where((row >= 0) & (row < rows), H, 0)  # how many columns to read: all, or none for a row on another rank
    y = tl.load(weight_ptr + row * stride_wv + cols, mask=cols < held, other=0.0)
    is_known = (v >= 0) & (v < vocab_size)
    y = tl.where(is_known, y.to(tl.float32), float("nan"))
    tl.store(y_ptr + token * H + cols, y.to(y_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def backward(
    grad_ptr, order_ptr, ends_ptr,
    dweight_ptr,
    H, stride_gn, padding_row,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dweight[v] = the sum of grad over row v's tokens, which are order[ends[v] : ends[v + 1]], in this order."""
    across = tl.cdiv(H, BLOCK_H)
    v = tl.program_id(0).to(tl.int64) // across
    cols = tl.program_id(0) % across * BLOCK_H + tl.arange(0, BLOCK_H)
    in_row = cols < H
    first, last = tl.load(ends_ptr + v), tl.load(ends_ptr + v + 1)
    if v == padding_row:
        last = first
    total = tl.zeros((BLOCK_H,), tl.float32)
    for start in range(first, last, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        token = tl.load(order_ptr + place, mask=place < last, other=0)
        is_there = (place < last)[:, None] & in_row[None, :]
        grad = tl.load(grad_ptr + token[:, None] * stride_gn + cols[None, :], mask=is_there, other=0.0)
        total += tl.sum(grad.to(tl.float32), 0)
    tl.store(dweight_ptr + v * H + cols, total.to(dweight_ptr.dtype.element_ty), mask=in_row)
