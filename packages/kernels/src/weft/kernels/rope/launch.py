"""Launches the rope kernels on x [..., T, heads * D], viewed as [N, heads * D]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch.backend import device_of
from ..launching.aot import Variant
from ..launching.launched import contiguous_rows, programs_of
from . import kernel

# 16 first and 16 second elements of pairs a thread: two 16-byte loads of bf16 each. The norm's backward also keeps the
# gradient, the weight and two float32 sums. Compiled without spills for sm_80 to sm_100 and gfx942; the speed is not
# measured yet.
PAIRS_PER_THREAD, BACKWARD_PAIRS_PER_THREAD = 16, 8
WARPS = 4
WARPS_AT_WORK = 16  # resident on a multiprocessor in backward, at 128 registers a thread


@dataclass(frozen=True, slots=True)
class _RopeTile:
    """How many tokens by how many heads a program computes.

    half: D / 2, rounded up to a power of two.
    """

    tokens: int
    heads: int
    half: int

    @classmethod
    def of(cls, heads: int, D: int, pairs: int) -> _RopeTile:
        """The tile with `pairs` pairs a thread: all heads of a token where they fit, to read its angles once."""
        half = 1 << (D // 2 - 1).bit_length()
        rows = max(1, 32 * WARPS * pairs // half)  # (token, head) pairs of a program
        tile_heads = min(rows, 1 << (heads - 1).bit_length())
        return cls(rows // tile_heads, tile_heads, half)

    def count(self, N: int, heads: int) -> int:
        """The number of tiles for N tokens of `heads` heads."""
        return -(-N // self.tokens) * -(-heads // self.heads)


def turn(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, inverse: bool, interleaved: bool) -> None:
    """Writes x, rotated by its angles or with `inverse` by the negative angles, into y, which is contiguous."""
    if not x.numel():
        return
    D = 2 * cos.shape[-1]
    rows, heads = contiguous_rows(x, x.shape[-1]), x.shape[-1] // D
    tile = _RopeTile.of(heads, D, PAIRS_PER_THREAD)
    with device_of(x):
        kernel.turn[(tile.count(len(rows), heads),)](
            rows, cos.contiguous(), sin.contiguous(),
            y,
            len(rows), heads, D, cos.numel() // (D // 2), rows.stride(0),
            INVERSE=inverse, INTERLEAVED=interleaved,
            TOKENS=tile.tokens, HEADS=tile.heads, HALF=tile.half, num_warps=WARPS,
        )  # fmt: skip


def normalize_and_turn(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, y: Tensor, rrms: Tensor, eps: float, interleaved: bool
) -> None:
    """Writes y = rope of the RMS norm of each head of x, and rrms [N, heads]."""
    if not x.numel():
        return
    D = 2 * cos.shape[-1]
    rows, heads = contiguous_rows(x, x.shape[-1]), x.shape[-1] // D
    tile = _RopeTile.of(heads, D, PAIRS_PER_THREAD)
    with device_of(x):
        kernel.normalize_and_turn[(tile.count(len(rows), heads),)](
            rows, weight.contiguous(), cos.contiguous(), sin.contiguous(),
            y, rrms,
            len(rows), heads, D, cos.numel() // (D // 2), rows.stride(0),
            eps,
            INTERLEAVED=interleaved, TOKENS=tile.tokens, HEADS=tile.heads, HALF=tile.half, num_warps=WARPS,
        )  # fmt: skip


def normalize_and_turn_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    rrms: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    interleaved: bool,
) -> None:
    """Writes dx and dweight [D], each where it is not None.

    dweight is the sum of the programs' addends, in the order of the programs.
    """
    if not x.numel():
        if dweight is not None:
            dweight.zero_()
        return
    D = 2 * cos.shape[-1]
    grad, x, heads = contiguous_rows(grad, x.shape[-1]), contiguous_rows(x, x.shape[-1]), x.shape[-1] // D
    tile = _RopeTile.of(heads, D, BACKWARD_PAIRS_PER_THREAD)
    programs = programs_of(x, tile.count(len(x), heads), WARPS, WARPS_AT_WORK)
    addends = None if dweight is None else x.new_empty(programs, D, dtype=torch.float32)
    with device_of(x):
        kernel.normalize_and_turn_backward[(programs,)](
            grad, x, weight.contiguous(), cos.contiguous(), sin.contiguous(), rrms,
            dx, addends,
            len(x), heads, D, cos.numel() // (D // 2), grad.stride(0), x.stride(0),
            INTERLEAVED=interleaved, TOKENS=tile.tokens, HEADS=tile.heads, HALF=tile.half, num_warps=WARPS,
        )  # fmt: skip
    if dweight is not None and addends is not None:
        dweight.copy_(addends.sum(0))


def _variant(of: str, dtype: str, heads: int, D: int, interleaved: bool = False) -> Variant:
    function = getattr(kernel, of)
    tile = _RopeTile.of(heads, D, BACKWARD_PAIRS_PER_THREAD if of.endswith("backward") else PAIRS_PER_THREAD)
    kinds = dict.fromkeys(("x_ptr", "y_ptr", "grad_ptr", "dx_ptr", "weight_ptr"), f"*{dtype}:16")
    kinds |= dict.fromkeys(("cos_ptr", "sin_ptr", "rrms_ptr", "dweight_ptr"), "*fp32:16")
    kinds |= dict.fromkeys(("D", "stride_xn", "stride_gn"), "i32:16") | {"N": "i32", "heads": "i32", "R": "i32"}
    kinds["eps"] = "fp32"
    constexprs = {"INVERSE": 0, "INTERLEAVED": int(interleaved)}
    constexprs |= {"TOKENS": tile.tokens, "HEADS": tile.heads, "HALF": tile.half}
    return Variant(
        f"rope.{of}/{dtype}-{heads}x{D}{'-interleaved' if interleaved else ''}",
        function,
        {each: kinds[each] for each in function.arg_names if each in kinds},
        {each: constexprs[each] for each in function.arg_names if each in constexprs},
        WARPS,
    )


VARIANTS = (
    _variant("turn", "bf16", 32, 128),
    _variant("turn", "bf16", 8, 128, interleaved=True),
    _variant("normalize_and_turn", "bf16", 32, 128),
    _variant("normalize_and_turn_backward", "bf16", 32, 128),
)
