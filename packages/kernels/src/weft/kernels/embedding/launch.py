"""Launches the embedding kernels, on tokens of any shape."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch.backend import device_of
from ..launching.aot import Variant
from ..launching.launched import block_length, contiguous_rows
from . import kernel

# 16 bytes of bf16 a thread. Backward reads four tokens at once, so a frequent token has four loads in flight.
# Compiled without spills for sm_80 to sm_100 and gfx942; the speed is not measured yet.
WARPS, BLOCK_N, MOST_H = 4, 4, 1024


def forward(tokens: Tensor, weight: Tensor, y: Tensor, vocab_start: int, vocab_size: int) -> None:
    """Writes the tokens' rows of the table into y [..., H], which is contiguous.

    weight: this rank's rows of the table, from vocab_start on. vocab_size: of the whole table. Tokens in another rank's
    rows get zeros, tokens outside the vocabulary NaN.
    """
    if not y.numel():
        return
    H = weight.shape[1]
    weight, block = contiguous_rows(weight, H), min(MOST_H, block_length(H))
    with device_of(y):
        kernel.forward[(tokens.numel() * -(-H // block),)](
            tokens.contiguous(), weight, y, len(weight), H, weight.stride(0), vocab_start, vocab_size,
            BLOCK_H=block, num_warps=WARPS,
        )  # fmt: skip


def backward(grad: Tensor, tokens: Tensor, dweight: Tensor, vocab_start: int, padding_row: int) -> None:
    """Writes the gradient of this rank's rows, from vocab_start on, into a contiguous dweight [rows, H].

    padding_row: the index in dweight of the row whose gradient is 0; an index outside dweight, as -1, for none.
    """
    if not dweight.numel():
        return
    rows, H = dweight.shape
    sorted_tokens, order = torch.sort(tokens.reshape(-1), stable=True)
    ends = torch.searchsorted(
        sorted_tokens, torch.arange(vocab_start, vocab_start + rows + 1, device=tokens.device, dtype=tokens.dtype)
    )
    grad, block = contiguous_rows(grad, H), min(MOST_H, block_length(H))
    with device_of(grad):
        kernel.backward[(rows * -(-H // block),)](
            grad, order, ends,
            dweight,
            H, grad.stride(0), padding_row,
            BLOCK_N=BLOCK_N, BLOCK_H=block, num_warps=WARPS,
        )  # fmt: skip


def _variant(of: str, dtype: str) -> Variant:
    function = getattr(kernel, of)
    kinds = {
        "tokens_ptr": "*i64:16",
        "order_ptr": "*i64:16",
        "ends_ptr": "*i64:16",
        "padding_row": "i32",
        "rows": "i32",
    }
    kinds |= dict.fromkeys(("weight_ptr", "y_ptr", "grad_ptr", "dweight_ptr"), f"*{dtype}:16")
    kinds |= dict.fromkeys(("H", "stride_wv", "stride_gn"), "i32:16") | dict.fromkeys(
        ("vocab_start", "vocab_size"), "i32"
    )
    constexprs = {"BLOCK_N": BLOCK_N, "BLOCK_H": MOST_H}
    return Variant(
        f"embedding.{of}/{dtype}",
        function,
        {each: kinds[each] for each in function.arg_names if each in kinds},
        {each: constexprs[each] for each in function.arg_names if each in constexprs},
        WARPS,
    )


VARIANTS = (_variant("forward", "bf16"), _variant("backward", "bf16"))
