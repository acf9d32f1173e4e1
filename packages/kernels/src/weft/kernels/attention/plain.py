"""Plain attention, causal with as many queries as keys or over all keys, by torch's own differentiable function.

torch's `scaled_dot_product_attention` chooses its fused kernel by the device and the dtype, and saves the operands, the
output and a logsumexp a row and head.

`is_kernel_faster` chooses between this function and Weft's kernel for a causal call on a GPU, by measured times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..dispatch.backend import chip_of, on_cpu
from ..launching.launched import TableRow

TABLE = Path(__file__).with_name("measured.json")  # benchmarks/tune_attention.py writes it
Heads = tuple[str, str, int]  # chip, dtype and head_dim of `CallClass`


def is_plain(query: Tensor, key: Tensor, causal: bool, window: int | None, *further_options: object) -> bool:
    """Whether torch's fused attention can run the call: causal with as many queries as keys, or over all keys.

    further_options: documents, sinks and further arguments of the call. A call where any is not None is not plain.
    """
    for each in further_options:
        if each is not None:
            return False
    T, S = query.shape[-2], key.shape[-2]
    if not query.numel() or not key.numel() or (window is not None and window < S):
        return False
    return T == S or T == 1 or not causal


def is_fused_on_gpu(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's attention is fused on a GPU. Torch's other function holds the scores of all T x S.

    Flash attention takes half precision, and memory-efficient attention also float32, in heads of a multiple of 16
    bytes (torch 2.13, ATen/native/transformers/cuda/sdp_utils.cpp). Neither takes float64.
    """
    return dtype in (torch.float16, torch.bfloat16) or (dtype == torch.float32 and head_dim % 4 == 0)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *more: None,
    head_dim: int,
    causal: bool = True,
    scale: float | None = None,
    first: int | None = None,
) -> Tensor:
    """query [..., T, heads * D], key and value [..., S, kv_heads * D] -> [..., T, heads * D]

    Causal if `causal` and T == S; otherwise over all keys.
    more, first: not read; `layout_rule.rule` and the operands are those of `ATTENTION`.
    """
    q, k, v = _heads(query, head_dim), _heads(key, head_dim), _heads(value, head_dim)
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        # CUDA's fused attention for float32 knows no grouped queries; with enable_gqa torch would run an unfused one.
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    triangle = causal and q.shape[2] == k.shape[2]
    if on_cpu(q) and q.is_meta:  # torch would choose an unfused function for meta tensors
        attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, triangle, scale=scale
        )[0]
    else:
        attended = scaled_dot_product_attention(q, k, v, is_causal=triangle, scale=scale, enable_gqa=groups > 1)
    return attended.transpose(1, 2).reshape(query.shape)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """[..., T, heads * D] -> [B, heads, T, D], with contiguous D; otherwise torch would run an unfused function."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-2], x.shape[-1] // head_dim, head_dim).transpose(1, 2)


class CallClass(NamedTuple):
    """A class of causal calls with as many queries as keys and no other option: a key of the table."""

    chip: str  # as "sm_90"
    dtype: str
    head_dim: int
    tokens: int  # of a row, rounded up to a power of two

    @classmethod
    def of(cls, chip: str, dtype: torch.dtype, head_dim: int, tokens: int) -> CallClass:
        return cls(chip, str(dtype).removeprefix("torch."), head_dim, 1 << max(0, tokens - 1).bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMeasurement(TableRow):
    """One row of the table: the measured times of forward and backward for a class of calls."""

    of: CallClass  # the timed calls
    seconds: float  # of Weft's kernels
    torch_seconds: float  # of torch's scaled_dot_product_attention
    where: str  # the device, and the versions of torch and triton


def faster_calls(measured: Mapping[CallClass, AttentionMeasurement]) -> dict[Heads, tuple[int, ...]]:
    """The classes whose Weft kernels were faster than torch: `CallClass.tokens`, by chip, dtype and head_dim."""
    found: dict[Heads, tuple[int, ...]] = {}
    for of, row in sorted(measured.items()):
        if row.seconds < row.torch_seconds:
            found[of[:3]] = (*found.get(of[:3], ()), of.tokens)
    return found


FASTER = faster_calls(AttentionMeasurement.read(TABLE))


def is_kernel_faster(device: torch.device, dtype: torch.dtype, head_dim: int, tokens: int) -> bool:
    """Whether Weft's kernels were faster than torch in the table; False if this class of calls was not measured."""
    if not FASTER:
        return False
    # Comparisons, as torch.compile may know of `tokens` no more than bounds: see `CallClass.of`.
    measured = FASTER.get((chip_of(device)[0], str(dtype).removeprefix("torch."), head_dim), ())
    return any(most // 2 < tokens <= most for most in measured)
