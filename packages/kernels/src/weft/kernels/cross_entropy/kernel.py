"""The two passes over the logits: `statistics` (2 bytes a bf16 logit) and `gradient` (4). They know no torch, no ranks.

Row `n` of the logits is row `n % T` of batch `n // T`, so a slice such as `logits[:, :-1]` is read where it lies.
Offsets are 64-bit: rows times stride, and classes times the stride of transposed logits, both pass 2**31.
"""

import triton
import triton.language as tl

# The lowest finite float32, as the running maximum before any logit. With -inf there, -inf - -inf would be NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _row_offset(T, stride_b, stride_t):
    row = tl.program_id(0).to(tl.int64)
    return (row // T) * stride_b + (row % T) * stride_t


# What differs between ranks or calls without mattering to the generated code is not compiled in.
@triton.jit(do_not_specialize=["T", "vocab_start", "vocab_size", "ignore_index"])
def statistics(
    x_ptr, target_ptr, statistics_ptr,
    V, T, stride_xb, stride_xt, stride_xv,
    vocab_start, vocab_size, ignore_index,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row: the largest logit and the sum of exp(logit - largest), both without the target; the target's logit.

    The last is 0 where this shard does not hold the target. An ignored row is not read: -inf, 0, 0.
    A target that is no class makes the sum NaN, and so the loss: a kernel cannot raise.

    Each lane keeps a maximum and a sum of its own and the lanes meet once, after the loop, so the loop has no barrier.
    Of exp(old - new) and exp(x - new) one is always exp(0), so a logit costs one exponential.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += _row_offset(T, stride_xb, stride_xt)
    target = tl.load(target_ptr + row).to(tl.int64)
    ignored = target == ignore_index
    classes_read = tl.where(ignored, 0, V)

    local = target - vocab_start
    is_here = (local >= 0) & (local < classes_read)
    target_logit = tl.load(x_ptr + local * stride_xv, mask=is_here, other=0.0).to(tl.float32)
    target_col = tl.where(is_here, local, -1).to(tl.int32)

    lanes = tl.arange(0, BLOCK_V)
    largest = tl.full([BLOCK_V], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, classes_read, BLOCK_V):
        cols = start + lanes
        in_row = cols < V
        x = tl.load(x_ptr + cols.to(tl.int64) * stride_xv, mask=in_row, other=-float("inf")).to(tl.float32)
        x = tl.where(cols == target_col, -float("inf"), x)
        rise = x - largest
        fade = tl.exp(-tl.abs(rise))
        total = tl.where(rise > 0, total * fade + 1.0, total + fade)
        largest = tl.maximum(largest, x)

    row_largest = tl.max(largest, 0)
    row_total = tl.sum(total * tl.exp(largest - row_largest), 0)
    # The largest logit adds 1, so a sum of 0 means that every one was -inf, or that there was none.
    row_largest = tl.where(row_total == 0.0, -float("inf"), row_largest)
    is_class = (target >= 0) & (target < vocab_size)
    row_total = tl.where(ignored | is_class, row_total, float("nan"))

    tl.store(statistics_ptr + row * 3, row_largest)
    tl.store(statistics_ptr + row * 3 + 1, row_total)
    tl.store(statistics_ptr + row * 3 + 2, target_logit)


@triton.jit(do_not_specialize=["T", "vocab_start"])
def gradient(
    x_ptr, target_ptr, largest_ptr, log_sum_ptr, scale_ptr, true_ptr, dx_ptr,
    V, T, stride_xb, stride_xt, stride_xv, stride_dn,
    vocab_start,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row: scale * softmax, with the gradient of the true class, which comes ready, in its place.

    A row of scale 0 is not read: its gradient is exactly 0, whatever its logits. The rows of `dx` are contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += _row_offset(T, stride_xb, stride_xt)
    dx_ptr += row * stride_dn
    scale = tl.load(scale_ptr + row)
    lanes = tl.arange(0, BLOCK_V)

    if scale == 0.0:
        for start in range(0, V, BLOCK_V):
            cols = start + lanes
            tl.store(dx_ptr + cols, tl.zeros([BLOCK_V], dx_ptr.dtype.element_ty), mask=cols < V)
    else:
        largest = tl.load(largest_ptr + row)
        log_sum = tl.load(log_sum_ptr + row)
        true = tl.load(true_ptr + row)
        local = tl.load(target_ptr + row).to(tl.int64) - vocab_start
        target_col = tl.where((local >= 0) & (local < V), local, -1).to(tl.int32)
        for start in range(0, V, BLOCK_V):
            cols = start + lanes
            in_row = cols < V
            x = tl.load(x_ptr + cols.to(tl.int64) * stride_xv, mask=in_row, other=-float("inf")).to(tl.float32)
            # Not x - (largest + log_sum): that sum rounds at the size of the logits, not at that of the difference.
            probability = tl.exp((x - largest) - log_sum)
            dx = tl.where(cols == target_col, true, scale * probability)
            tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=in_row)
