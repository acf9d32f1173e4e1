"""Launches the kernels: views the logits as batches of rows, allocates what they write, picks their sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..aot import Variant
from ..backend import device_of
from . import guess, kernel
from .reference import Shard, Upstream


@dataclass(frozen=True, slots=True)
class Launch:
    """How many classes a program takes at a time, and with how many warps."""

    block_v: int
    warps: int


# Two 16-byte loads in flight for each thread: 16 classes of bf16 or 8 of float32. What `statistics` keeps for them fits in the
# registers with no spill (compiled for sm_80 to sm_100 and gfx942; its speed is not measured yet); that of float32 takes more, and
# 16 warps of it would spill on sm_80. The same for all kernels, so that a loss has the same bits whichever made its statistics.
BYTES_PER_THREAD = 32
MOST_WARPS = {2: 16, 4: 8}  # by the bytes of a logit
# Where a row is read twice by one program there are few of them, so that the rows at work stay in the L2 from their first
# reading to their second: one for each multiprocessor, and more while their rows take no more than this share of it. 132 rows
# of 256 KiB, a vocabulary of 128 Ki in bf16, are 33 MiB of an H100's 50. Its speed is not measured yet.
L2_SHARE = 0.7
# So few have few loads on the way, and read blocks ahead, one fewer than stages: by Little's law a multiprocessor of an H200 needs
# 4.8 TB/s * 0.7 µs / 132, some 25 KB, and a block is BYTES_PER_THREAD of 512 threads, 16 KB. Where more is computed than a plain
# logsumexp, the stages would spill registers.
FUSED_STAGES = 3
# Of a multiprocessor: 65536 registers, of which a thread takes up to 128 where it makes the statistics, too, and 32 to 40 where
# it does not. More programs than that would wait for the first to end.
WARPS_AT_WORK, WARPS_AT_WORK_FUSED = 48, 16
ROWS = 128  # that a program of `losses` takes: one warp, which reads 12 bytes a row and shard


def config(V: int, itemsize: int) -> Launch:
    """The launch for rows of V classes of `itemsize` bytes: a short row is one block, with the warps that it can fill."""
    of_thread = BYTES_PER_THREAD // itemsize
    row = 1 << (max(V, of_thread) - 1).bit_length()  # the power of two at or above V
    block_v = min(row, MOST_WARPS[itemsize] * 32 * of_thread)
    return Launch(block_v, warps=max(1, block_v // (32 * of_thread)))


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
    launch, options = config(V, x.itemsize), shard.options
    part = None if weight is None else shard.part(weight, V)
    with device_of(logits):
        kernel.statistics[(N,)](
            x, target.reshape(N).contiguous(), _float32(part, out), out,
            V, T, *x.stride(),
            shard.start, shard.size, options.ignore_index, options.logit_scale, options.softcap or 1.0,
            SUM=shard.sums, WEIGHTED=weight is not None, CAP=options.softcap is not None, RAGGED=_ragged(x),
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
    with device_of(statistics):
        kernel.losses[(-(-N // ROWS),)](
            statistics.contiguous(), target.reshape(N).contiguous(), _float32(weight, loss), _weight_sum(weight, loss), loss, lse,
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
    guessed: Tensor | None = None,
) -> Tensor:
    """See `reference.gradient`. guessed: the upstream gradient of the loss for which `out` has been made."""
    if out.numel():
        _gradient(logits, target, weight, statistics.contiguous(), upstream, shard, out, guessed)
    return out


def statistics_and_gradient(
    logits: Tensor, target: Tensor, weight: Tensor | None, upstream: Upstream, shard: Shard, out: Tensor
) -> Tensor:
    """See `reference.statistics_and_gradient`; by one kernel, whose second reading of a row is from the L2. Of an upstream
    gradient of NaN it makes the statistics alone.
    """
    if logits.numel() == 0:
        return statistics(logits, target, weight, shard)
    found = torch.empty(1, target.numel(), shard.columns, dtype=torch.float32, device=logits.device)
    _gradient(logits, target, weight, found, upstream, shard, out, fused=True)
    return found[0]


def _gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    upstream: Upstream,
    shard: Shard,
    out: Tensor,
    guessed: Tensor | None = None,
    fused: bool = False,
) -> None:
    x = as_batches(logits)  # [B, T, V]
    _, T, V = x.shape
    N, options = target.numel(), shard.options
    grad, grad_lse = (_rows(each, N, statistics) for each in (upstream.loss, upstream.lse))
    denominator = statistics if upstream.denominator is None else upstream.denominator.to(torch.float32)
    part = None if weight is None else shard.part(weight, V)
    launch = config(V, x.itemsize)
    programs = N if guessed is None and not fused else min(N, _programs(x, launch, fused))
    with device_of(logits):
        kernel.gradient[(programs,)](
            x, target.reshape(N).contiguous(), _float32(part, statistics), _float32(weight, statistics),
            _weight_sum(weight, statistics), statistics, grad, grad_lse, denominator,
            *((statistics, statistics) if guessed is None else (guessed, guess.arrived(logits.device))), out,
            N, V, T, *x.stride(), V, grad.stride(0), grad_lse.stride(0), len(statistics), statistics.stride(0),
            shard.start, shard.size, options.ignore_index, options.logit_scale, options.softcap or 1.0,
            float(options.label_smoothing), float(options.z_loss),
            SUM=shard.sums, WEIGHTED=weight is not None, CAP=options.softcap is not None, Z_LOSS=options.z_loss > 0,
            GRAD=upstream.loss is not None, GRAD_LSE=upstream.lse is not None,
            DENOMINATOR=upstream.denominator is not None, FUSED=fused, PRECOMPUTED=guessed is not None,
            RAGGED=_ragged(x, out), BLOCK_V=launch.block_v,
            STAGES=_stages(fused, shard.sums or options.softcap is not None), num_warps=launch.warps,
        )  # fmt: skip


def _ragged(*tensors: Tensor) -> bool:
    """Whether contiguous rows begin in the same places of 16-byte words in all tensors, and not all at their start for all that
    Triton knows: of a size it knows whether 16 divides it.

    Of 16-bit logits: a word of float32 is half as many classes, and the kernel spills registers.
    """
    contiguous = all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in tensors)
    return contiguous and tensors[0].shape[-1] % 16 > 0 and tensors[0].itemsize == 2


def _stages(fused: bool, more: bool) -> int:
    """more: than a plain logsumexp is computed."""
    return FUSED_STAGES if fused and not more else 1


def _programs(x: Tensor, launch: Launch, fused: bool) -> int:
    """How many take all rows of x [..., V] in turn, as many on each multiprocessor; in the interpreter a few, so that one has
    several rows.
    """
    if not x.is_cuda:
        return 3
    device = torch.cuda.get_device_properties(x.device)
    at_once = (WARPS_AT_WORK_FUSED if fused else WARPS_AT_WORK) // launch.warps
    if fused:
        rows = x.shape[-1] * x.itemsize * device.multi_processor_count  # bytes of one on each
        cached = int(L2_SHARE * device.L2_cache_size) // rows
        at_once = min(at_once, cached or at_once)  # where not even those fit, all come from device memory twice
    return device.multi_processor_count * at_once


def _rows(grad: Tensor | None, N: int, other: Tensor) -> Tensor:
    """One number a row, of any stride; without any, a tensor that the kernels do not read."""
    if grad is None:
        return other
    return grad.to(torch.float32).reshape(-1).expand(N)


def _float32(weight: Tensor | None, other: Tensor) -> Tensor:
    """The weights as the kernels read them; without any, a tensor that they do not read."""
    return other if weight is None else weight.to(torch.float32).contiguous()


def _weight_sum(weight: Tensor | None, other: Tensor) -> Tensor:
    """Of all classes, a number; without weights a tensor that the kernels do not read."""
    return other if weight is None else weight.sum(dtype=torch.float64)


def _variants(dtype: str, stride_xv: str = "1", **switches: int) -> tuple[Variant, ...]:
    """The kernels for long rows of `dtype`, 16-byte aligned unless RAGGED; stride_xv is "1" where classes are contiguous.

    switches: the constexprs that are not as usual.
    """
    switched = (name.lower() if on else f"no_{name.lower()}" for name, on in switches.items())
    name = "-".join((dtype, "contiguous" if stride_xv == "1" else "strided", *switched))
    on = {
        "SUM": 0,
        "WEIGHTED": 0,
        "CAP": 0,
        "Z_LOSS": 0,
        "GRAD": 1,
        "GRAD_LSE": 0,
        "DENOMINATOR": 1,
        "FUSED": 0,
        "PRECOMPUTED": 0,
        "RAGGED": 0,
        **switches,
    }
    launch = config(1 << 20, 4 if dtype == "fp32" else 2)
    size = "i32" if on["RAGGED"] else "i32:16"
    logits = {"V": size, "T": "i32", "stride_xb": size, "stride_xt": size, "stride_xv": stride_xv}
    read = {"x_ptr": f"*{dtype}:16", "target_ptr": "*i64:16", "shard_weight_ptr": "*fp32:16"}
    classes = {"vocab_start": "i32", "vocab_size": "i32", "ignore_index": "i32"}
    bend = {"scale": "fp32", "cap": "fp32"}
    arriving = ("weight", "weight_sum", "statistics", "grad", "grad_lse", "denominator", "guess", "arrived")
    strides = {"stride_dn": size, "stride_gn": "i32", "stride_ln": "i32", "R": "i32", "stride_r": "i32"}
    return (
        Variant(
            f"cross_entropy.statistics/{name}",
            kernel.statistics,
            {**read, "statistics_ptr": "*fp32:16", **logits, **classes, **bend},
            {each: on[each] for each in ("SUM", "WEIGHTED", "CAP", "RAGGED")} | {"BLOCK_V": launch.block_v},
            launch.warps,
        ),
        Variant(
            f"cross_entropy.gradient/{name}",
            kernel.gradient,
            {
                **read,
                **{f"{each}_ptr": "*fp32" for each in arriving},
                "weight_sum_ptr": "*fp64" if on["WEIGHTED"] else "*fp32",
                "dx_ptr": f"*{dtype}:16",
                "N": "i32",
                **logits,
                **strides,
            }
            | {**classes, **bend, "label_smoothing": "fp32", "z_loss": "fp32"},
            {**on, "BLOCK_V": launch.block_v, "STAGES": _stages(on["FUSED"] > 0, on["SUM"] + on["CAP"] > 0)},
            launch.warps,
        ),
    )


def _losses(**switches: int) -> Variant:
    pointers = {f"{each}_ptr": "*fp32:16" for each in ("statistics", "target", "weight", "weight_sum", "loss", "lse")}
    pointers |= {"weight_ptr": "*fp32", "weight_sum_ptr": "*fp64" if "WEIGHTED" in switches else "*fp32"}
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
    *_variants("bf16", RAGGED=1),
    *_variants("bf16", SUM=1),
    *_variants("bf16", SUM=1, WEIGHTED=1),
    *_variants("bf16", CAP=1),
    *_variants("bf16", SUM=1, WEIGHTED=1, CAP=1, Z_LOSS=1, GRAD_LSE=1),
    *_variants("fp32", CAP=1),
    *_variants("bf16", GRAD=0, GRAD_LSE=1)[1:],
    *_variants("bf16", PRECOMPUTED=1)[1:],
    *_variants("bf16", FUSED=1)[1:],
    *_variants("bf16", FUSED=1, RAGGED=1)[1:],
    *_variants("bf16", FUSED=1, Z_LOSS=1)[1:],
    *_variants("bf16", FUSED=1, WEIGHTED=1)[1:],
    *_variants("bf16", FUSED=1, SUM=1)[1:],
    *_variants("fp32", FUSED=1)[1:],
    *_variants("fp32", FUSED=1, Z_LOSS=1)[1:],
    *_variants("fp32", FUSED=1, SUM=1, WEIGHTED=1, Z_LOSS=1)[1:],
    *_variants("bf16", FUSED=1, SUM=1, WEIGHTED=1, CAP=1, Z_LOSS=1)[1:],
    _losses(),
    _losses(SUM=1, WEIGHTED=1),
)
