"""Launches the kernels: views the logits as batches of rows, allocates what they write, picks their sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..aot import Variant
from . import kernel
from .reference import Shard, Upstream


@dataclass(frozen=True, slots=True)
class Launch:
    """How many classes a program takes at a time, and with how many warps."""

    block_v: int
    warps: int


# 16 classes a thread: two 16-byte loads of bf16 in flight for each, and the two float32 that `statistics` keeps for a
# class fit in the registers with no spill (compiled for sm_80 to sm_100; its speed is not measured yet).
CLASSES_PER_THREAD = 16
LONG_ROW = Launch(block_v=4096, warps=8)
# Where a row is read twice by one program there is a program for each multiprocessor, so that the rows at work stay in the L2
# from their first reading to their second: 132 of 256 KiB, a vocabulary of 128 Ki in bf16, are 33 MiB of an H100's 50. Its
# speed is not measured yet.
FUSED_ROW = Launch(block_v=8192, warps=16)
ROWS = 128  # that a program of `losses` takes: one warp, which reads 12 bytes a row and shard


def config(V: int, fused: bool = False) -> Launch:
    """The launch for rows of V classes: a short row is one block, with the warps that it can fill."""
    if fused and LONG_ROW.block_v < V:
        return FUSED_ROW
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
    launch, options = config(V), shard.options
    part = None if weight is None else shard.part(weight, V)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        kernel.statistics[(N,)](
            x, target.reshape(N).contiguous(), _float32(part, out), out,
            V, T, *x.stride(),
            shard.start, shard.size, options.ignore_index, options.logit_scale, options.softcap or 1.0,
            SUM=shard.sums, WEIGHTED=weight is not None, CAP=options.softcap is not None,
            BLOCK_V=launch.block_v, num_warps=launch.warps,
        )  # fmt: skip
    return out


def losses(statistics: Tensor, target: Tensor, weight: Tensor | None, shard: Shard) -> tuple[Tensor, Tensor]:
    """See `reference.losses`."""
    R, N, _ = statistics.shape
    loss, lse = (torch.empty(target.shape, dtype=torch.float32, device=target.device) for _ in range(2))
    if N == 0:
        return loss, lse
    options = shard.options
    with torch.cuda.device_of(statistics):  # type: ignore[no-untyped-call]
        kernel.losses[(-(-N // ROWS),)](
            statistics.contiguous(), target.reshape(N).contiguous(), _float32(weight, loss), _whole(weight, loss), loss, lse,
            N, R, shard.size, options.ignore_index, float(options.label_smoothing), float(options.z_loss),
            SUM=shard.sums, WEIGHTED=weight is not None, BLOCK_N=ROWS, num_warps=1,
        )  # fmt: skip
    return loss, lse


def gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    upstream: Upstream,
    shard: Shard,
    out: Tensor,
) -> Tensor:
    """See `reference.gradient`."""
    if out.numel():
        _gradient(
            logits, target, weight, statistics.contiguous(), upstream, shard, out, config(logits.shape[-1]), False
        )
    return out


def statistics_and_gradient(
    logits: Tensor, target: Tensor, weight: Tensor | None, upstream: Upstream, shard: Shard
) -> Tensor:
    """See `reference.statistics_and_gradient`; by one kernel, whose second reading of a row is from the L2."""
    if logits.numel() == 0:
        return statistics(logits, target, weight, shard)
    out = torch.empty(1, target.numel(), shard.columns, dtype=torch.float32, device=logits.device)
    _gradient(logits, target, weight, out, upstream, shard, logits, config(logits.shape[-1], fused=True), fused=True)
    return out[0]


def _gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    upstream: Upstream,
    shard: Shard,
    out: Tensor,
    launch: Launch,
    fused: bool = False,
) -> None:
    x = as_batches(logits)  # [B, T, V]
    _, T, V = x.shape
    N, options = target.numel(), shard.options
    grad, grad_lse = (_rows(each, N, statistics) for each in (upstream.loss, upstream.lse))
    denominator = statistics if upstream.denominator is None else upstream.denominator.to(torch.float32)
    part = None if weight is None else shard.part(weight, V)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        kernel.gradient[(_multiprocessors(logits) if fused else N,)](
            x, target.reshape(N).contiguous(), _float32(part, statistics), _float32(weight, statistics),
            _whole(weight, statistics), statistics, grad, grad_lse, denominator, out,
            N, V, T, *x.stride(), V, grad.stride(0), grad_lse.stride(0), len(statistics), statistics.stride(0),
            shard.start, shard.size, options.ignore_index, options.logit_scale, options.softcap or 1.0,
            float(options.label_smoothing), float(options.z_loss),
            SUM=shard.sums, WEIGHTED=weight is not None, CAP=options.softcap is not None, Z_LOSS=options.z_loss > 0,
            GRAD=upstream.loss is not None, GRAD_LSE=upstream.lse is not None,
            DENOMINATOR=upstream.denominator is not None, FUSED=fused, BLOCK_V=launch.block_v, num_warps=launch.warps,
        )  # fmt: skip


def _multiprocessors(logits: Tensor) -> int:
    """Of the device; in the interpreter a few, so that a program has several rows."""
    return torch.cuda.get_device_properties(logits.device).multi_processor_count if logits.is_cuda else 3


def _rows(grad: Tensor | None, N: int, other: Tensor) -> Tensor:
    """One number a row, of any stride; without any, a tensor that the kernels do not read."""
    if grad is None:
        return other
    return grad.to(torch.float32).reshape(-1).expand(N)


def _float32(weight: Tensor | None, other: Tensor) -> Tensor:
    """The weights as the kernels read them; without any, a tensor that they do not read."""
    return other if weight is None else weight.to(torch.float32).contiguous()


def _whole(weight: Tensor | None, other: Tensor) -> Tensor:
    return other if weight is None else weight.to(torch.float32).sum()


def _variants(dtype: str, stride_xv: str = "1", **switches: int) -> tuple[Variant, ...]:
    """The kernels for long rows of `dtype`, 16-byte aligned; stride_xv is "1" where the classes are contiguous.

    switches: the constexprs that are on.
    """
    name = "-".join((dtype, "contiguous" if stride_xv == "1" else "strided", *map(str.lower, switches)))
    on = {
        "SUM": 0,
        "WEIGHTED": 0,
        "CAP": 0,
        "Z_LOSS": 0,
        "GRAD": 1,
        "GRAD_LSE": 0,
        "DENOMINATOR": 1,
        "FUSED": 0,
        **switches,
    }
    launch = config(1 << 20, fused=bool(on["FUSED"]))
    logits = {"V": "i32:16", "T": "i32", "stride_xb": "i32:16", "stride_xt": "i32:16", "stride_xv": stride_xv}
    read = {"x_ptr": f"*{dtype}:16", "target_ptr": "*i64:16", "part_ptr": "*fp32:16"}
    classes = {"vocab_start": "i32", "vocab_size": "i32", "ignore_index": "i32"}
    bend = {"scale": "fp32", "cap": "fp32"}
    arriving = ("weight", "whole", "statistics", "grad", "grad_lse", "denominator")
    strides = {"stride_dn": "i32:16", "stride_gn": "i32", "stride_ln": "i32", "R": "i32", "stride_r": "i32"}
    return (
        Variant(
            f"cross_entropy.statistics/{name}",
            kernel.statistics,
            {**read, "statistics_ptr": "*fp32:16", **logits, **classes, **bend},
            {each: on[each] for each in ("SUM", "WEIGHTED", "CAP")} | {"BLOCK_V": LONG_ROW.block_v},
            LONG_ROW.warps,
        ),
        Variant(
            f"cross_entropy.gradient/{name}",
            kernel.gradient,
            {
                **read,
                **{f"{each}_ptr": "*fp32:16" for each in arriving},
                "dx_ptr": f"*{dtype}:16",
                "N": "i32",
                **logits,
                **strides,
            }
            | {**classes, **bend, "label_smoothing": "fp32", "z_loss": "fp32"},
            {**on, "BLOCK_V": launch.block_v},
            launch.warps,
        ),
    )


def _losses(**switches: int) -> Variant:
    pointers = {f"{each}_ptr": "*fp32:16" for each in ("statistics", "target", "weight", "whole", "loss", "lse")}
    sizes = dict.fromkeys(("N", "R", "vocab_size", "ignore_index"), "i32")
    return Variant(
        "-".join(("cross_entropy.losses/fp32", *map(str.lower, switches))),
        kernel.losses,
        {**pointers, "target_ptr": "*i64:16", **sizes, "label_smoothing": "fp32", "z_loss": "fp32"},
        {"SUM": 0, "WEIGHTED": 0, **switches, "BLOCK_N": ROWS},
        warps=1,
    )


VARIANTS = (
    *_variants("bf16"),
    *_variants("fp16"),
    *_variants("fp32"),
    *_variants("bf16", stride_xv="i64"),
    *_variants("bf16", SUM=1),
    *_variants("bf16", SUM=1, WEIGHTED=1),
    *_variants("bf16", CAP=1),
    *_variants("bf16", SUM=1, WEIGHTED=1, CAP=1, Z_LOSS=1, GRAD_LSE=1),
    *_variants("bf16", FUSED=1)[1:],
    *_variants("fp32", FUSED=1)[1:],
    *_variants("bf16", FUSED=1, SUM=1, WEIGHTED=1, CAP=1, Z_LOSS=1)[1:],
    _losses(),
    _losses(SUM=1, WEIGHTED=1),
)
