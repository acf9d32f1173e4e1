"""Sums of matrix products kept in 24 bits, and rounded to bfloat16 after the last addition.

The 24 bits are the upper bits of a float32. 16 of them are in the result's memory, and 8 in extra memory; a float32
sum would need 16 extra bits. Each partial sum is rounded by at most 2**-16 of its value. Even if all ADDITIONS
roundings err the same way, they add up to a quarter of the error of rounding the largest partial sum to bfloat16.
Usually they are far less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import on_cpu, use_triton
from .chunks import whole_tiles

ADDITIONS = 64  # the most additions; a sum of more products is float32
PRODUCT_BYTES = 1 << 25  # bytes of a block of the product in float32, added while still in the L2
PRODUCT_BYTES_ON_CPU = 1 << 21
NAN = 0x7FC00000  # the canonical NaN: rounding up the bits of another NaN may overflow


class Sum24:
    """The sum of `additions` products of bfloat16 factors, shaped [V, H] as `like`. Computed and added in float32."""

    def __init__(self, like: Tensor, additions: int) -> None:
        V, H = like.shape
        # The upper bits, until all products are added; then the result.
        self.total = torch.empty(V, H, dtype=torch.bfloat16, device=like.device)
        self._low_bits: Tensor | None = torch.empty(V, H, dtype=torch.uint8, device=like.device)
        nbytes = PRODUCT_BYTES_ON_CPU if on_cpu(like) else PRODUCT_BYTES
        rows = min(V, whole_tiles(nbytes // (4 * max(1, H))))
        self._block: Tensor | None = torch.empty(rows, H, dtype=torch.float32, device=like.device)
        self._added, self._additions = 0, additions

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a.T @ b, for a [n, V] and b [n, H]. One GEMM for each block of rows."""
        assert self._low_bits is not None and self._block is not None, "additions are left"
        first, last = self._added == 0, self._added == self._additions - 1
        if on_cpu(a):
            b = b.float()
        for start in range(0, len(self.total), max(1, len(self._block))):
            rows = slice(start, min(start + len(self._block), len(self.total)))
            factor, product = a[:, rows].mT, self._block[: rows.stop - start]
            if on_cpu(a):
                torch.mm(factor.float(), b, out=product)
            else:
                torch.mm(factor, b, out_dtype=torch.float32, out=product)
            accumulate(product, self.total[rows], self._low_bits[rows], first, last)
        self._added += 1
        if last:
            self._low_bits = self._block = None


def accumulate(product: Tensor, high: Tensor, low: Tensor, first: bool, last: bool) -> None:
    """Add a float32 product to a sum in 24 bits.

    high: the upper 16 bits, unrounded, typed as bfloat16. low: the next 8 bits, as uint8. All are contiguous, of one
        shape.
    first: there is no sum yet; the product becomes the sum.
    last: the sum is rounded to bfloat16, in `high`; `low` is not written.
    """
    if use_triton(product):
        from . import launch  # imports triton, which a CPU installation may not have

        launch.accumulate(product, high, low, first, last)
        return
    bits = high.view(torch.int16)
    if not first:
        product += (bits.int() << 16 | low.int() << 8).view(torch.float32)
    if last:
        high.copy_(product)
        return
    total = product.view(torch.int32)
    rounded = torch.where(product.isnan(), NAN, total + 0x7F + (total >> 8 & 1))  # to the nearest, ties to even
    bits.copy_(rounded >> 16)
    low.copy_(rounded >> 8 & 0xFF)
