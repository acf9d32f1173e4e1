"""Launches the kernels: views the logits as batches of rows, allocates what they write, picks their sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..aot import Variant
from . import kernel
from .reference import Rows, Shard


@dataclass(frozen=True, slots=True)
class Launch:
    """How many classes a program takes at a time, and with how many warps."""

    block_v: int
    warps: int


# 16 classes a thread: two 16-byte loads of bf16 in flight for each, and the two float32 that `statistics` keeps for a
# class fit in the registers with no spill (compiled for sm_80 to sm_100; its speed is not measured yet).
CLASSES_PER_THREAD = 16
LONG_ROW = Launch(block_v=4096, warps=8)


def config(V: int) -> Launch:
    """The launch for rows of V classes: a short row is one block, with the warps that it can fill."""
    block_v = 1 << (max(V, CLASSES_PER_THREAD) - 1).bit_length()  # the power of two at or above V
    if block_v >= LONG_ROW.block_v:
        return LONG_ROW
    return Launch(block_v, warps=max(1, block_v // (32 * CLASSES_PER_THREAD)))


def as_batches(logits: Tensor) -> Tensor:
    """The logits as [B, T, V]: a view wherever two strides reach every row, otherwise a copy."""
    *leading, V = logits.shape
    for split in range(max(1, len(leading))):
        try:
            return logits.view(math.prod(leading[:split]), math.prod(leading[split:]), V)
        except RuntimeError:  # these dims do not merge; the next split leaves one more of them outside
            continue
    return logits.reshape(1, math.prod(leading), V)


def statistics(logits: Tensor, target: Tensor, weight: Tensor | None, shard: Shard) -> Tensor:
    """See `reference.statistics`."""
    x = as_batches(logits)  # [B, T, V]
    _, T, V = x.shape
    N = target.numel()
    out = torch.empty(N, shard.columns, dtype=torch.float32, device=logits.device)
    if N == 0:
        return out
    launch = config(V)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        kernel.statistics[(N,)](
            x, target.reshape(N).contiguous(), _float32(weight, out), out,
            V, T, *x.stride(),
            shard.start, shard.size, shard.ignore_index, shard.scale, shard.cap or 1.0,
            SUM=shard.sums, WEIGHTED=weight is not None, CAP=shard.cap is not None,
            BLOCK_V=launch.block_v, num_warps=launch.warps,
        )  # fmt: skip
    return out


def gradient(logits: Tensor, target: Tensor, weight: Tensor | None, rows: Rows, shard: Shard, out: Tensor) -> Tensor:
    """See `reference.gradient`."""
    if out.numel() == 0:
        return out
    x = as_batches(logits)  # [B, T, V]
    _, T, V = x.shape
    N = target.numel()
    launch = config(V)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        kernel.gradient[(N,)](
            x, target.reshape(N).contiguous(), _float32(weight, rows.factor),
            rows.largest, rows.log_sum, rows.factor, rows.factor if rows.spread is None else rows.spread, rows.true, out,
            V, T, *x.stride(), V,
            shard.start, shard.scale, shard.cap or 1.0,
            SUM=shard.sums, WEIGHTED=weight is not None, CAP=shard.cap is not None,
            BLOCK_V=launch.block_v, num_warps=launch.warps,
        )  # fmt: skip
    return out


def _float32(weight: Tensor | None, other: Tensor) -> Tensor:
    """The weights as the kernels read them; without any, a tensor that they do not read."""
    return other if weight is None else weight.to(torch.float32).contiguous()


def _variants(dtype: str, stride_xv: str = "1", **switches: int) -> tuple[Variant, Variant]:
    """Both kernels for long rows of `dtype`, 16-byte aligned; stride_xv is "1" where the classes are contiguous.

    switches: the constexprs that are on.
    """
    name = "-".join((dtype, "contiguous" if stride_xv == "1" else "strided", *map(str.lower, switches)))
    logits = {"V": "i32:16", "T": "i32", "stride_xb": "i32:16", "stride_xt": "i32:16", "stride_xv": stride_xv}
    read = {"x_ptr": f"*{dtype}:16", "target_ptr": "*i64:16", "weight_ptr": "*fp32:16"}
    rows = {f"{row}_ptr": "*fp32:16" for row in ("largest", "log_sum", "factor", "spread", "true")}
    bend = {"scale": "fp32", "cap": "fp32"}
    constexprs = {"SUM": 0, "WEIGHTED": 0, "CAP": 0, **switches, "BLOCK_V": LONG_ROW.block_v}
    return (
        Variant(
            f"cross_entropy.statistics/{name}",
            kernel.statistics,
            {**read, "statistics_ptr": "*fp32:16", **logits}
            | {"vocab_start": "i32", "vocab_size": "i32", "ignore_index": "i32", **bend},
            constexprs,
            LONG_ROW.warps,
        ),
        Variant(
            f"cross_entropy.gradient/{name}",
            kernel.gradient,
            {**read, **rows, "dx_ptr": f"*{dtype}:16", **logits, "stride_dn": "i32:16", "vocab_start": "i32", **bend},
            constexprs,
            LONG_ROW.warps,
        ),
    )


VARIANTS = (
    *_variants("bf16"),
    *_variants("fp16"),
    *_variants("fp32"),
    *_variants("bf16", stride_xv="i64"),
    *_variants("bf16", SUM=1),
    *_variants("bf16", SUM=1, WEIGHTED=1),
    *_variants("bf16", CAP=1),
    *_variants("bf16", SUM=1, WEIGHTED=1, CAP=1),
)
