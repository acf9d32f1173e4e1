"""Launches the kernels: views the logits as batches of rows, allocates what they write, picks their sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..aot import Variant
from ..backend import device_of
from . import guess, kernel
from .merged import Merged, Shard, Upstream
from .options import Options


@dataclass(frozen=True, slots=True)
class Launch:
    """How many classes a program takes at a time, and with how many warps."""

    block_v: int
    warps: int


# Each thread has two 16-byte loads in flight: 16 classes of bf16, or 8 of float32. What `statistics` keeps for these fits in the
# registers without spills, as compiled for sm_80 to sm_100 and gfx942. Float32 needs more registers: with 16 warps it would spill on
# sm_80. The speed is not measured yet. All kernels have the same block, so that a loss has the same bits whichever kernel computed its
# statistics.
BYTES_PER_THREAD = 32
MOST_WARPS = {2: 16, 4: 8}  # by the bytes of a logit
# Where one program reads a row twice, the row should stay in the L2 from the first reading to the second. So there are few programs:
# one on each multiprocessor, and more while all their rows together take no more than this share of the L2. 132 rows of a vocabulary
# of 128 Ki in bf16, 256 KiB each, are 33 MiB of an H100's 50. The speed is not measured yet.
L2_SHARE = 0.7
# So few programs have too few loads in flight, unless they load blocks ahead: stages - 1 of them. By Little's law a multiprocessor of
# an H200 needs 4.8 TB/s * 0.7 µs / 132 in flight, some 25 KB. A block is BYTES_PER_THREAD for each of 512 threads, 16 KB.
FUSED_STAGES = 3
# Warps that run at once on a multiprocessor, which has 65536 registers. A thread takes 32 to 40 of them for the gradient alone, and
# up to 128 where it also computes the statistics. More programs would wait for the first ones to end.
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
    out, rivals = _for_statistics(N, shard, logits.device)
    if N == 0:
        return _joined(out, rivals)
    launch, options, part = config(V, x.itemsize), shard.options, _part(weight, shard, V)
    with device_of(logits):
        kernel.statistics[(N,)](
            x, target.reshape(N).contiguous(), _float32(part), _weight_sum(part, shard), out, rivals,
            V, T, *x.stride(),
            shard.start, shard.size, options.ignore_index, options.logit_scale, options.softcap,
            SUM=shard.sums, RAGGED=_ragged(x), BLOCK_V=launch.block_v, num_warps=launch.warps,
        )  # fmt: skip
    return _joined(out, rivals)


def _for_statistics(N: int, shard: Shard, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Memory for the statistics; and for the rivals [N, 1] where those are asked for, apart, as no other kernel reads them."""
    asked = shard.options.return_token_accuracy
    widths = (shard.options.columns - asked, 1)
    out, rivals = (torch.empty(N, width, dtype=torch.float32, device=device) for width in widths)
    return out, rivals if asked else None


def _joined(statistics: Tensor, rivals: Tensor | None) -> Tensor:
    return statistics if rivals is None else torch.cat((statistics, rivals), 1)


def _without_rivals(statistics: Tensor, shard: Shard) -> Tensor:
    return statistics[..., : shard.options.columns - shard.options.return_token_accuracy].contiguous()


def losses(
    statistics: Tensor, target: Tensor, weight: Tensor | None, shard: Shard, merged: Merged | None = None
) -> tuple[Tensor, Tensor | None]:
    """See `merged.losses`. The kernel merges the statistics itself."""
    R, N, _ = statistics.shape
    loss, lse = (torch.empty(target.shape, dtype=torch.float32, device=target.device) for _ in range(2))
    if N == 0:
        return loss, lse
    options = shard.options
    with device_of(statistics):
        kernel.losses[(-(-N // ROWS),)](
            _without_rivals(statistics, shard), target.reshape(N).contiguous(), _float32(weight), _weight_sum(weight, shard),
            loss, lse,
            N, R, shard.size, options.ignore_index, _or_none(options.label_smoothing), _or_none(options.z_loss),
            BLOCK_N=ROWS, num_warps=1,
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
    """See `reference.gradient`. guessed: the upstream gradient for which `out` already holds the gradient."""
    if out.numel() == 0:
        return out
    if guessed is not None:
        return _gradient_unless_guessed(logits, target, weight, statistics, upstream, shard, out, guessed)
    x, N = as_batches(logits), target.numel()  # [B, T, V]
    _, T, V = x.shape
    options, launch, statistics = shard.options, config(V, x.itemsize), _without_rivals(statistics, shard)
    (grad, stride_gn), (grad_lse, stride_ln) = (_rows(each, N) for each in (upstream.loss, upstream.lse))
    with device_of(logits):
        kernel.gradient[(N,)](
            x, target.reshape(N).contiguous(), _float32(_part(weight, shard, V)), _float32(weight),
            _weight_sum(weight, shard), statistics, grad, grad_lse, _float32(upstream.denominator), out,
            V, T, *x.stride(), stride_gn, stride_ln, V, len(statistics), statistics.stride(0),
            shard.start, shard.size, options.ignore_index, options.logit_scale, options.softcap,
            _or_none(options.label_smoothing), _or_none(options.z_loss),
            RAGGED=_ragged(x, out), BLOCK_V=launch.block_v, num_warps=launch.warps,
        )  # fmt: skip
    return out


def _gradient_unless_guessed(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    upstream: Upstream,
    shard: Shard,
    out: Tensor,
    guessed: Tensor,
) -> Tensor:
    """`gradient` of one shard of all classes, where `out` holds the gradient for the guessed upstream gradient."""
    assert upstream.loss is not None and upstream.loss.numel() == 1, "the loss is one number, and the only output"
    x, N = as_batches(logits), target.numel()  # [B, T, V]
    _, T, V = x.shape
    options, launch = shard.options, config(V, x.itemsize)
    with device_of(logits):
        kernel.gradient_unless_guessed[(min(N, _programs(x, launch, fused=False)),)](
            x, target.reshape(N).contiguous(), _float32(weight), _weight_sum(weight, shard), _without_rivals(statistics, shard),
            _float32(upstream.loss), _float32(upstream.denominator), guessed, guess.history(logits.device), out,
            N, V, T, *x.stride(), V,
            options.ignore_index, options.logit_scale, options.softcap,
            _or_none(options.label_smoothing), _or_none(options.z_loss),
            RAGGED=_ragged(x, out), BLOCK_V=launch.block_v, num_warps=launch.warps,
        )  # fmt: skip
    return out


def statistics_and_gradient(
    logits: Tensor, target: Tensor, weight: Tensor | None, upstream: Upstream, shard: Shard, out: Tensor
) -> tuple[Tensor, Merged | None]:
    """See `reference.statistics_and_gradient`. One kernel does both: it reads a row a second time from the L2. Where the upstream
    gradient is NaN it computes the statistics alone.
    """
    if logits.numel() == 0:
        return statistics(logits, target, weight, shard), None
    assert upstream.loss is not None and upstream.loss.numel() == 1, "its gradient is one number"
    x, N = as_batches(logits), target.numel()  # [B, T, V]
    _, T, V = x.shape
    options, launch = shard.options, config(V, x.itemsize)
    row_statistics, rivals = _for_statistics(N, shard, logits.device)
    with device_of(logits):
        kernel.statistics_and_gradient[(min(N, _programs(x, launch, fused=True)),)](
            x, target.reshape(N).contiguous(), _float32(weight), _weight_sum(weight, shard),
            _float32(upstream.loss), _float32(upstream.denominator), row_statistics, rivals, out,
            N, V, T, *x.stride(), V,
            options.ignore_index, options.logit_scale, options.softcap,
            _or_none(options.label_smoothing), _or_none(options.z_loss),
            RAGGED=_ragged(x, out), BLOCK_V=launch.block_v, STAGES=_stages(options), num_warps=launch.warps,
        )  # fmt: skip
    return _joined(row_statistics, rivals), None


def _ragged(*tensors: Tensor) -> bool:
    """Whether the kernels take the rows as RAGGED: contiguous, but not all 16-byte aligned as far as Triton can tell. Of a size Triton
    knows only whether 16 divides it.

    The tensors themselves must be aligned: then a row begins in the same place of a 16-byte word in all of them. 16-bit logits alone:
    a word has half as many float32, and the kernel would spill registers.
    """
    contiguous = all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in tensors)
    return contiguous and tensors[0].shape[-1] % 16 > 0 and tensors[0].itemsize == 2


def _stages(options: Options) -> int:
    """Of the first pass of `statistics_and_gradient`. One where it computes more than a plain logsumexp: more would spill registers."""
    more = options.label_smoothing or options.softcap is not None or options.return_token_accuracy
    return 1 if more else FUSED_STAGES


def _programs(x: Tensor, launch: Launch, fused: bool) -> int:
    """How many programs share the rows of x [..., V]: the same number for each multiprocessor."""
    if not x.is_cuda:
        return 3  # in the interpreter: few, so that a program has several rows
    device = torch.cuda.get_device_properties(x.device)
    at_once = (WARPS_AT_WORK_FUSED if fused else WARPS_AT_WORK) // launch.warps
    if fused:
        rows = x.shape[-1] * x.itemsize * device.multi_processor_count  # bytes of one on each
        cached = int(L2_SHARE * device.L2_cache_size) // rows
        at_once = min(at_once, cached or at_once)  # where not even one row each fits, all come from device memory twice
    return device.multi_processor_count * at_once


def _rows(grad: Tensor | None, N: int) -> tuple[Tensor | None, int]:
    """An upstream gradient as one number a row, and the stride: 0 where it is one number for all."""
    if grad is None:
        return None, 0
    grad = grad.to(torch.float32).reshape(-1).expand(N)
    return grad, grad.stride(0)


def _part(weight: Tensor | None, shard: Shard, V: int) -> Tensor | None:
    return None if weight is None else shard.part(weight, V)


def _float32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.float32).contiguous()


def _weight_sum(weight: Tensor | None, shard: Shard) -> Tensor | None:
    """The sum of these weights, a number in float64, where label smoothing asks for it."""
    return None if weight is None or not shard.sums else weight.sum(dtype=torch.float64)


def _or_none(factor: float) -> float | None:
    """An option's factor; None where it is 0 and the option costs nothing."""
    return float(factor) if factor else None


def _variant(of: Any, dtype: str, *asked: str) -> Variant:
    """A kernel for long rows of `dtype`, contiguous and 16-byte aligned.

    asked: "strided" or "ragged" for other rows; options; "rival" for the accuracy; "no_grad" and "grad_lse" for what arrives;
        "to_bf16" for a gradient in another dtype than the logits.
    """
    name = "-".join(
        (dtype, "strided" if "strided" in asked else "contiguous", *(each for each in asked if each != "strided"))
    )
    launch = config(1 << 20, 4 if dtype == "fp32" else 2)
    size = "i32" if "ragged" in asked else "i32:16"  # of a row
    kinds = dict.fromkeys(("N", "T", "R", "stride_gn", "stride_ln", "stride_r"), "i32")
    kinds |= dict.fromkeys(("vocab_start", "vocab_size", "ignore_index"), "i32")
    kinds |= dict.fromkeys(("V", "stride_xb", "stride_xt", "stride_dn"), size)
    kinds |= {"stride_xv": "i64" if "strided" in asked else "1", "scale": "fp32"}
    kinds |= {"x_ptr": f"*{dtype}:16", "target_ptr": "*i64:16"}
    kinds["dx_ptr"] = "*bf16:16" if "to_bf16" in asked else f"*{dtype}:16"
    kinds |= dict.fromkeys(("statistics_ptr", "denominator_ptr", "guess_ptr", "history_ptr"), "*fp32")
    if of is kernel.statistics:
        kinds["statistics_ptr"] = "*fp32:16"
    for argument, kind, is_given in (
        ("cap", "fp32", "cap" in asked),
        ("rival_ptr", "*fp32:16", "rival" in asked),
        ("label_smoothing", "fp32", "sum" in asked),
        ("z_loss", "fp32", "z_loss" in asked),
        ("shard_weight_ptr", "*fp32:16", "weighted" in asked),
        ("shard_weight_sum_ptr", "*fp64", "weighted" in asked and "sum" in asked),
        ("weight_ptr", "*fp32" if of is kernel.gradient else "*fp32:16", "weighted" in asked),
        ("weight_sum_ptr", "*fp64", "weighted" in asked and "sum" in asked),
        ("grad_ptr", "*fp32", "no_grad" not in asked),
        ("grad_lse_ptr", "*fp32", "grad_lse" in asked),
    ):
        kinds[argument] = kind if is_given else "None"
    constexprs = {"SUM": int("sum" in asked), "RAGGED": int("ragged" in asked), "BLOCK_V": launch.block_v}
    constexprs["STAGES"] = 1 if {"sum", "cap", "rival"} & set(asked) else FUSED_STAGES
    return Variant(
        f"cross_entropy.{of.__name__}/{name}",
        of,
        {each: kinds[each] for each in of.arg_names if each in kinds},
        {each: constexprs[each] for each in of.arg_names if each in constexprs},
        launch.warps,
    )


def _losses(*asked: str) -> Variant:
    weighted, smoothed = "weighted" in asked, "sum" in asked
    return Variant(
        "-".join(("cross_entropy.losses/fp32", *asked)),
        kernel.losses,
        {
            "statistics_ptr": "*fp32:16",
            "target_ptr": "*i64:16",
            "weight_ptr": "*fp32" if weighted else "None",
            "weight_sum_ptr": "*fp64" if weighted and smoothed else "None",
            "loss_ptr": "*fp32:16",
            "lse_ptr": "*fp32:16",
            **dict.fromkeys(("N", "R", "vocab_size", "ignore_index"), "i32"),
            "label_smoothing": "fp32" if smoothed else "None",
            "z_loss": "None",
        },
        {"BLOCK_N": ROWS},
        warps=1,
    )


_ROWS: tuple[tuple[str, ...], ...] = (
    ("bf16",),
    ("fp16",),
    ("fp32",),
    ("bf16", "strided"),
    ("bf16", "ragged"),
    ("bf16", "sum"),
    ("bf16", "sum", "weighted"),
    ("bf16", "cap"),
    ("bf16", "sum", "weighted", "cap", "z_loss", "grad_lse"),
    ("fp32", "cap"),
)
_FUSED: tuple[tuple[str, ...], ...] = (
    ("bf16",),
    ("bf16", "ragged"),
    ("bf16", "z_loss"),
    ("bf16", "weighted"),
    ("bf16", "sum"),
    ("bf16", "rival"),
    ("bf16", "sum", "weighted", "cap", "z_loss"),
    ("fp32",),
    ("fp32", "z_loss"),
    ("fp32", "sum", "weighted", "z_loss"),
    ("fp32", "to_bf16"),
)
VARIANTS = (
    *(_variant(kernel.statistics, *row) for row in _ROWS),
    _variant(kernel.statistics, "bf16", "rival"),
    *(_variant(kernel.gradient, *row) for row in _ROWS),
    _variant(kernel.gradient, "bf16", "no_grad", "grad_lse"),
    _variant(kernel.gradient, "fp32", "to_bf16"),
    _variant(kernel.gradient_unless_guessed, "bf16"),
    *(_variant(kernel.statistics_and_gradient, *row) for row in _FUSED),
    _losses(),
    _losses("sum", "weighted"),
)
