"""A sum of products that will be rounded to bfloat16, kept in 24 bits until all products are added.

They are the upper 24 bits of a float32. 16 of them are in the memory of the result, and 8 beside it; a float32 sum would need 16 beside
it. Each partial sum is rounded by at most 2**-16 of itself. Even if ADDITIONS roundings all err the same way, they add up to a quarter of
the rounding of the largest partial sum to bfloat16. Otherwise they are far less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import on_cpu, use_triton
from .chunks import whole_tiles

ADDITIONS = 64  # at the most; a sum of more products is a float32
PRODUCT_BYTES = 1 << 25  # the size of a block of the product in float32, which is added while the L2 still holds it
PRODUCT_BYTES_ON_CPU = 1 << 21
NAN = 0x7FC00000  # the canonical NaN: the bits of another one may overflow when they are rounded up


class Sum24:
    """The sum of `additions` products of factors in bfloat16, of the shape [V, H] of `like`; computed and added in float32."""

    def __init__(self, like: Tensor, additions: int) -> None:
        V, H = like.shape
        self.total = torch.empty(
            V, H, dtype=torch.bfloat16, device=like.device
        )  # the upper bits, until all products are added
        self._low: Tensor | None = torch.empty(V, H, dtype=torch.uint8, device=like.device)
        nbytes = PRODUCT_BYTES_ON_CPU if on_cpu(like) else PRODUCT_BYTES
        rows = min(V, whole_tiles(nbytes // (4 * max(1, H))))
        self._block: Tensor | None = torch.empty(rows, H, dtype=torch.float32, device=like.device)
        self._added, self._additions = 0, additions

    def add(self, a: Tensor, b: Tensor) -> None:
        """Adds a.T @ b, of a [n, V] and b [n, H]: one GEMM for each block of rows."""
        assert self._low is not None and self._block is not None, "additions are left"
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
            accumulate(product, self.total[rows], self._low[rows], first, last)
        self._added += 1
        if last:
            self._low = self._block = None


def accumulate(product: Tensor, high: Tensor, low: Tensor, first: bool, last: bool) -> None:
    """Adds a float32 product to a sum in 24 bits: `high` has the upper 16 bits, typed bfloat16 and not rounded, `low` the next 8, as uint8.

    All are contiguous and of one shape.
    first: there is no sum yet, the product becomes it.  last: the sum is rounded to bfloat16, in `high`; `low` is not written.
    """
    if use_triton(product):
        from . import launch  # imports triton, which a CPU run may not have

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
