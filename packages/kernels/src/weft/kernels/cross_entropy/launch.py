"""Launches cross-entropy's kernels: views the logits as rows, allocates the outputs, chooses block sizes and warps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import device_of
from ..launching.aot import Variant
from . import guess, kernel
from .merged import LossShard, MergedStatistics, Upstream
from .options import Options


@dataclass(frozen=True, slots=True)
class LossLaunch:
    """The block size and warps of a kernel launch. Chosen by `config`."""

    block_v: int  # classes processed at a time
    warps: int  # per program


# Each thread has two 16-byte loads in flight: 16 classes of bf16, or 8 of float32. The registers of `statistics` then
# fit without spills, as compiled for sm_80 to sm_100 and gfx942. Float32 needs more registers, and would spill on
# sm_80 with 16 warps. The speed is not measured yet. All kernels use the same block size, so a loss has the same bits
# whichever kernel computed the statistics.
BYTES_PER_THREAD = 32
MOST_WARPS = {2: 16, 4: 8}  # by bytes per logit
# A program that reads a row twice should find the row in the L2 cache the second time. So few programs are launched:
# one for each multiprocessor, or more as long as all their rows together take at most this share of the L2. 132 rows
# of a vocabulary of 128 Ki in bf16, 256 KiB each, are 33 MiB of an H100's 50. The speed is not measured yet.
L2_SHARE = 0.7
# So few programs have too few loads in flight, unless they load stages - 1 blocks ahead. By Little's law a
# multiprocessor of an H200 needs 4.8 TB/s * 0.7 µs / 132 in flight, about 25 KB. A block is BYTES_PER_THREAD for each
# of 512 threads, 16 KB.
FUSED_STAGES = 3
# Warps to run at once on a multiprocessor, which has 65536 registers. A thread needs 32 to 40 registers for the
# gradient alone, and up to 128 if it also computes the statistics. More programs would wait for the first to end.
WARPS_AT_WORK, WARPS_AT_WORK_FUSED = 48, 16
ROWS = 128  # per program of `losses`: one warp, which reads 12 bytes for each row and shard


def config(V: int, itemsize: int) -> LossLaunch:
    """The launch for rows of V classes of `itemsize` bytes. A short row is one block, with as many warps as it
    fills.
    """
    thread_classes = BYTES_PER_THREAD // itemsize
    row = 1 << (max(V, thread_classes) - 1).bit_length()  # V rounded up to a power of two
    block_v = min(row, MOST_WARPS[itemsize] * 32 * thread_classes)
    return LossLaunch(block_v, warps=max(1, block_v // (32 * thread_classes)))


def as_batches(logits: Tensor) -> Tensor:
    """The logits as [B, T, V]: a view if two strides reach every row, otherwise a copy."""
    *leading, V = logits.shape
    for split in range(max(1, len(leading))):
        try:
            return logits.view(math.prod(leading[:split]), math.prod(leading[split:]), V)
        except RuntimeError:  # these dims cannot be merged; move one more into B
            continue
    return logits.reshape(1, math.prod(leading), V)


def statistics(logits: Tensor, target: Tensor, weight: Tensor | None, shard: LossShard) -> Tensor:
    """See `reference.statistics`."""
    x = as_batches(logits)  # [B, T, V]
    _, T, V = x.shape
    N = target.numel()
    out, rivals = _allocate_statistics(N, shard, logits.device)
    if N == 0:
        return _join(out, rivals)
    launch, options, part = config(V, x.itemsize), shard.options, _part(weight, shard, V)
    with device_of(logits):
        kernel.statistics[(N,)](
            x, target.reshape(N).contiguous(), _float32(part), _weight_sum(part, shard), out, rivals,
            V, T, *x.stride(),
            shard.start, shard.vocab_size, options.ignore_index, options.logit_scale, options.softcap,
            SUM=shard.options.label_smoothing > 0, RAGGED=_is_ragged(x), BLOCK_V=launch.block_v, num_warps=launch.warps,
        )  # fmt: skip
    return _join(out, rivals)


def _allocate_statistics(N: int, shard: LossShard, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Memory for the statistics, and for the rivals [N, 1] if requested: apart, because only `correct` reads them."""
    has_rivals = shard.options.return_token_accuracy
    widths = (shard.options.columns - has_rivals, 1)
    out, rivals = (torch.empty(N, width, dtype=torch.float32, device=device) for width in widths)
    return out, rivals if has_rivals else None


def _join(statistics: Tensor, rivals: Tensor | None) -> Tensor:
    return statistics if rivals is None else torch.cat((statistics, rivals), 1)


def _without_rivals(statistics: Tensor, shard: LossShard) -> Tensor:
    return statistics[..., : shard.options.columns - shard.options.return_token_accuracy].contiguous()


def losses(
    statistics: Tensor, target: Tensor, weight: Tensor | None, shard: LossShard, merged: MergedStatistics | None = None
) -> tuple[Tensor, Tensor | None]:
    """See `merged.losses`. The kernel merges the shards' statistics itself."""
    R, N, _ = statistics.shape
    loss, lse = (torch.empty(target.shape, dtype=torch.float32, device=target.device) for _ in range(2))
    if N == 0:
        return loss, lse
    options = shard.options
    with device_of(statistics):
        kernel.losses[(-(-N // ROWS),)](
            _without_rivals(statistics, shard), target.reshape(N).contiguous(),
            _float32(weight), _weight_sum(weight, shard), loss, lse,
            N, R, shard.vocab_size, options.ignore_index, _or_none(options.label_smoothing), _or_none(options.z_loss),
            BLOCK_N=ROWS, num_warps=1,
        )  # fmt: skip
    return loss, lse


def gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    upstream: Upstream,
    shard: LossShard,
    out: Tensor,
    guessed: Tensor | None = None,
) -> Tensor:
    """See `reference.gradient`. guessed: the guess of the upstream gradient for which `out` holds the gradient."""
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
            shard.start, shard.vocab_size, options.ignore_index, options.logit_scale, options.softcap,
            _or_none(options.label_smoothing), _or_none(options.z_loss),
            RAGGED=_is_ragged(x, out), BLOCK_V=launch.block_v, num_warps=launch.warps,
        )  # fmt: skip
    return out


def _gradient_unless_guessed(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    upstream: Upstream,
    shard: LossShard,
    out: Tensor,
    guessed: Tensor,
) -> Tensor:
    """`gradient`, for one shard with all classes whose `out` already holds the gradient for the guess."""
    assert upstream.loss is not None and upstream.loss.numel() == 1, "a guess is for a scalar loss alone"
    x, N = as_batches(logits), target.numel()  # [B, T, V]
    _, T, V = x.shape
    options, launch = shard.options, config(V, x.itemsize)
    with device_of(logits):
        kernel.gradient_unless_guessed[(min(N, _programs(x, launch, fused=False)),)](
            x, target.reshape(N).contiguous(), _float32(weight), _weight_sum(weight, shard),
            _without_rivals(statistics, shard), _float32(upstream.loss), _float32(upstream.denominator),
            guessed, guess.history(logits.device), out,
            N, V, T, *x.stride(), V,
            options.ignore_index, options.logit_scale, options.softcap,
            _or_none(options.label_smoothing), _or_none(options.z_loss),
            RAGGED=_is_ragged(x, out), BLOCK_V=launch.block_v, num_warps=launch.warps,
        )  # fmt: skip
    return out


def statistics_and_gradient(
    logits: Tensor, target: Tensor, weight: Tensor | None, upstream: Upstream, shard: LossShard, out: Tensor
) -> tuple[Tensor, MergedStatistics | None]:
    """See `reference.statistics_and_gradient`. A single kernel does both, and reads rows the second time from the L2.

    If the upstream gradient is NaN, only the statistics are computed.
    """
    if logits.numel() == 0:
        return statistics(logits, target, weight, shard), None
    assert upstream.loss is not None and upstream.loss.numel() == 1, "the loss is a scalar"
    x, N = as_batches(logits), target.numel()  # [B, T, V]
    _, T, V = x.shape
    options, launch = shard.options, config(V, x.itemsize)
    row_statistics, rivals = _allocate_statistics(N, shard, logits.device)
    with device_of(logits):
        kernel.statistics_and_gradient[(min(N, _programs(x, launch, fused=True)),)](
            x, target.reshape(N).contiguous(), _float32(weight), _weight_sum(weight, shard),
            _float32(upstream.loss), _float32(upstream.denominator), row_statistics, rivals, out,
            N, V, T, *x.stride(), V,
            options.ignore_index, options.logit_scale, options.softcap,
            _or_none(options.label_smoothing), _or_none(options.z_loss),
            RAGGED=_is_ragged(x, out), BLOCK_V=launch.block_v, STAGES=_stages(options), num_warps=launch.warps,
        )  # fmt: skip
    return _join(row_statistics, rivals), None


def _is_ragged(*tensors: Tensor) -> bool:
    """Whether to launch a kernel with RAGGED rows: contiguous, but without 16-byte alignment known to Triton.

    About a size Triton knows only whether 16 divides it. The tensors themselves must be 16-byte aligned: then a row
    starts at the same offset in a 16-byte word in all of them. Only for 16-bit logits: with half as many float32 in a
    word the kernel would spill registers.
    """
    contiguous = all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in tensors)
    return contiguous and tensors[0].shape[-1] % 16 > 0 and tensors[0].itemsize == 2


def _stages(options: Options) -> int:
    """Pipeline stages of the first pass of `statistics_and_gradient`.

    One if the options ask for more than a plain logsumexp: more stages would then spill registers.
    """
    needs_registers = options.label_smoothing or options.softcap is not None or options.return_token_accuracy
    return 1 if needs_registers else FUSED_STAGES


def _programs(x: Tensor, launch: LossLaunch, fused: bool) -> int:
    """How many programs share the rows of x [..., V]: the same number for each multiprocessor."""
    if not x.is_cuda:
        return 3  # in the interpreter: few, to give a program several rows
    device = torch.cuda.get_device_properties(x.device)
    at_once = (WARPS_AT_WORK_FUSED if fused else WARPS_AT_WORK) // launch.warps
    if fused:
        rows = x.shape[-1] * x.itemsize * device.multi_processor_count  # bytes of one row for each multiprocessor
        cached = int(L2_SHARE * device.L2_cache_size) // rows
        # if the L2 does not hold one row each, both reads of every row come from device memory
        at_once = min(at_once, cached or at_once)
    return device.multi_processor_count * at_once


def _rows(grad: Tensor | None, N: int) -> tuple[Tensor | None, int]:
    """An upstream gradient as one number for each row, and the stride: 0 for a scalar."""
    if grad is None:
        return None, 0
    grad = grad.to(torch.float32).reshape(-1).expand(N)
    return grad, grad.stride(0)


def _part(weight: Tensor | None, shard: LossShard, V: int) -> Tensor | None:
    return None if weight is None else shard.part(weight, V)


def _float32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.float32).contiguous()


def _weight_sum(weight: Tensor | None, shard: LossShard) -> Tensor | None:
    """The sum of the weights, a scalar in float64; None if label smoothing does not need one."""
    return None if weight is None or not shard.options.label_smoothing else weight.sum(dtype=torch.float64)


def _or_none(factor: float) -> float | None:
    """An option's factor; None for 0, for which the kernel is compiled without the option."""
    return float(factor) if factor else None


def _variant(jit_function: Any, dtype: str, *features: str) -> Variant:
    """A variant of one of the kernels, for long rows of `dtype`, contiguous and 16-byte aligned.

    features: "strided" or "ragged" for other rows; names of options; "rival" for the accuracy; "no_grad" and "grad_lse"
        for other upstream gradients; "to_bf16" for a gradient in another dtype than the logits.
    """
    name = "-".join(
        (dtype, "strided" if "strided" in features else "contiguous", *(each for each in features if each != "strided"))
    )
    launch = config(1 << 20, 4 if dtype == "fp32" else 2)
    size = "i32" if "ragged" in features else "i32:16"  # of a row: whether 16 divides it
    kinds = dict.fromkeys(("N", "T", "R", "stride_gn", "stride_ln", "stride_r"), "i32")
    kinds |= dict.fromkeys(("vocab_start", "vocab_size", "ignore_index"), "i32")
    kinds |= dict.fromkeys(("V", "stride_xb", "stride_xt", "stride_dn"), size)
    kinds |= {"stride_xv": "i64" if "strided" in features else "1", "scale": "fp32"}
    kinds |= {"x_ptr": f"*{dtype}:16", "target_ptr": "*i64:16"}
    kinds["dx_ptr"] = "*bf16:16" if "to_bf16" in features else f"*{dtype}:16"
    kinds |= dict.fromkeys(("statistics_ptr", "denominator_ptr", "guess_ptr", "history_ptr"), "*fp32")
    if jit_function is kernel.statistics:
        kinds["statistics_ptr"] = "*fp32:16"
    for argument, kind, is_used in (
        ("cap", "fp32", "cap" in features),
        ("rival_ptr", "*fp32:16", "rival" in features),
        ("label_smoothing", "fp32", "sum" in features),
        ("z_loss", "fp32", "z_loss" in features),
        ("shard_weight_ptr", "*fp32:16", "weighted" in features),
        ("shard_weight_sum_ptr", "*fp64", "weighted" in features and "sum" in features),
        ("weight_ptr", "*fp32" if jit_function is kernel.gradient else "*fp32:16", "weighted" in features),
        ("weight_sum_ptr", "*fp64", "weighted" in features and "sum" in features),
        ("grad_ptr", "*fp32", "no_grad" not in features),
        ("grad_lse_ptr", "*fp32", "grad_lse" in features),
    ):
        kinds[argument] = kind if is_used else "None"
    constexprs = {"SUM": int("sum" in features), "RAGGED": int("ragged" in features), "BLOCK_V": launch.block_v}
    constexprs["STAGES"] = 1 if {"sum", "cap", "rival"} & set(features) else FUSED_STAGES
    return Variant(
        f"cross_entropy.{jit_function.__name__}/{name}",
        jit_function,
        {each: kinds[each] for each in jit_function.arg_names if each in kinds},
        {each: constexprs[each] for each in jit_function.arg_names if each in constexprs},
        launch.warps,
    )


def _losses(*features: str) -> Variant:
    weighted, smoothed = "weighted" in features, "sum" in features
    return Variant(
        "-".join(("cross_entropy.losses/fp32", *features)),
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
