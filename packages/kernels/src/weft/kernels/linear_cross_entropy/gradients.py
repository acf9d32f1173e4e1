"""Gradients of a linear layer's input, weight and bias, summed over chunks of rows.

The weight's gradient is the sum of a matrix product for each chunk. In bfloat16 the sum is kept in 24 bits, as `Sum24`,
and rounded to bfloat16 after the last addition. The 24 bits are the upper bits of a float32: sign, exponent and 15 bits
of the fraction. 16 bits are in the result's memory, and 8 in extra memory; a float32 sum would need 16 extra bits. Each
addition rounds the sum by at most 2**-16 of the sum. Even if all 64 roundings (`ADDITIONS`) err in the same direction,
the total error is only a quarter of the error of rounding the largest partial sum to bfloat16. Usually the total error
is far less.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..dispatch.backend import can_read, is_recorded, on_cpu, use_triton
from .chunks import LogitFactors, whole_tiles

ADDITIONS = 64  # the most products which a `Sum24` adds; a sum of more products is float32
PRODUCT_BYTES = 1 << 25  # bytes of a block of the product in float32, added while still in the L2
PRODUCT_BYTES_ON_CPU = 1 << 21
NAN = 0x7FC00000  # the canonical NaN: rounding up the bits of another NaN may overflow

Wanted = tuple[torch.dtype | None, ...]  # dtypes of the gradients of input, weight and bias; None if not wanted


class ProductGradients:
    """The gradients of a `LogitFactors` with respect to x, weight and bias; `add` adds a chunk of rows.

    Made by the op's forward if forward computes the gradients (`function.in_forward`), for an upstream gradient of 1:
    backward multiplies the results by the upstream gradient (`scale_gradient`). Otherwise made by backward.

    Each gradient is None if not wanted. dx, in x's dtype, has the rows of the chunks added until now, and undefined
    further rows. dweight and dbias are sums over the chunks in float32 (float64 for float64 factors), whose error does
    not grow with the number of chunks. There are two exceptions, if dweight is wanted in x's dtype: for a single
    chunk, dweight is the GEMM's result; for up to ADDITIONS chunks in bfloat16, dweight is a `Sum24`.
    """

    def __init__(self, product: LogitFactors, wanted: Wanted, chunks: list[slice]) -> None:
        x, weight = product.x, product.weight
        self._product = product
        self._wide = torch.promote_types(x.dtype, torch.float32)
        self.dx = None if wanted[0] is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._weight_sum: _GemmSum | Sum24 | None = None
        if wanted[1] is not None:
            if 1 < len(chunks) <= ADDITIONS and may_be_in_24_bits(x.dtype, wanted):
                self._weight_sum = Sum24(weight, len(chunks))
            else:
                dtype = x.dtype if len(chunks) == 1 and wanted[1] == x.dtype else self._wide
                self._weight_sum = _GemmSum(weight, dtype, zeros=not chunks)
        self.dbias = None if wanted[2] is None else torch.zeros(len(weight), dtype=self._wide, device=x.device)

    @property
    def dweight(self) -> Tensor | None:
        """The weight's gradient; of a `Sum24`, valid only after the last chunk."""
        return None if self._weight_sum is None else self._weight_sum.total

    def add(self, rows: slice, dlogits: Tensor) -> None:
        """Add a chunk. rows: of the chunk. dlogits: the gradient of the chunk's logits [n, V].

        A GEMM for dx, and a GEMM for dweight; in a `Sum24`, a GEMM for each block of dweight's rows.
        """
        if self.dx is not None:
            torch.mm(dlogits, self._product.weight, out=self.dx[rows])
        if self._weight_sum is not None:
            self._weight_sum.add(dlogits, self._product.x[rows])
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=self._wide)


class _GemmSum:
    """A weight's gradient: a sum of matrix products in `dtype`, shaped as `like`. Each product's GEMM adds to the sum.

    zeros: whether the sum starts at zero. Needed only if no product will be added: the first product overwrites.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, *, zeros: bool) -> None:
        self.total = (torch.zeros_like if zeros else torch.empty_like)(like, dtype=dtype)
        self._beta = 0  # the first product overwrites uninitialized memory

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a.T @ b in the sum's dtype, by one GEMM. Uses out=, because autocast leaves calls with out= alone."""
        wide, beta, self._beta = self.total.dtype, self._beta, 1
        if a.dtype == wide:
            torch.addmm(self.total, a.mT, b, beta=beta, out=self.total)
        elif on_cpu(a):
            torch.addmm(self.total, a.mT.to(wide), b.to(wide), beta=beta, out=self.total)
        else:
            torch.addmm(self.total, a.mT, b, out_dtype=wide, beta=beta, out=self.total)


class Sum24:
    """The sum of `additions` products of bfloat16 factors, shaped [V, H] as `like`, kept in 24 bits an element.

    Each product is computed in float32, a block of rows at a time, and added in float32; the result is rounded to 24
    bits, and after the last addition to bfloat16.
    """

    def __init__(self, like: Tensor, additions: int) -> None:
        V, H = like.shape
        # The upper 16 bits, until all products are added; then the result.
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
            a_block, product = a[:, rows].mT, self._block[: rows.stop - start]
            if on_cpu(a):
                torch.mm(a_block.float(), b, out=product)
            else:
                torch.mm(a_block, b, out_dtype=torch.float32, out=product)
            accumulate(product, self.total[rows], self._low_bits[rows], first, last)
        self._added += 1
        if last:
            self._low_bits = self._block = None


def accumulate(product: Tensor, high: Tensor, low: Tensor, first: bool, last: bool) -> None:
    """Add a float32 product to a sum in 24 bits. The product may be overwritten.

    high, low: the sum, a float32 rounded to the upper 24 bits. `high` has the first 16 bits, as bfloat16: cut off, not
        rounded to 16. `low` has the last 8 bits, as uint8. All tensors are contiguous and of the same shape.
    first: there is no sum yet; the product becomes the sum.
    last: the sum is rounded to bfloat16, in `high`; `low` is not written.
    """
    if use_triton(product):
        from . import launch  # imports triton, which a CPU installation may not have

        launch.accumulate(product, high, low, first, last)
        return
    high_bits = high.view(torch.int16)
    if not first:
        product += (high_bits.int() << 16 | low.int() << 8).view(torch.float32)
    if last:
        high.copy_(product)
        return
    total = product.view(torch.int32)
    rounded = torch.where(product.isnan(), NAN, total + 0x7F + (total >> 8 & 1))  # to the nearest, ties to even
    high_bits.copy_(rounded >> 16)
    low.copy_(rounded >> 8 & 0xFF)


def may_be_in_24_bits(dtype: torch.dtype, wanted: Wanted) -> bool:
    """Whether the weight's gradient is summed in a `Sum24` when the number of chunks is 2 to ADDITIONS.

    dtype: of the factors. Also asked before the tokens are cut into chunks: the extra memory of a `Sum24` leaves less
    for a chunk (`chunks_of`), and all ranks must cut the same chunks. The answer is therefore True for a weight frozen
    on this rank, too: the weight's gradient may be wanted on another rank.
    """
    return dtype == torch.bfloat16 and wanted[1] in (None, dtype)


def is_last_use(saved: Tensor) -> bool:
    """Whether the running backward is the last to use the saved tensors, which may then be overwritten.

    saved: any of the saved tensors, for the device.
    Autograd frees saved tensors after backward, unless the graph is kept. torch's compiler asks autograd the same
    question before reusing saved memory. The answer is False if this torch lacks the function, and for a backward
    captured in a CUDA graph, which may be replayed.
    """
    keeps: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
    return not keeps() and not is_recorded(saved)


def scale_gradient(gradient: Tensor, factor: Tensor, dtype: torch.dtype, in_place: bool) -> Tensor:
    """Return gradient * factor in `dtype`, multiplied in float32, or in the gradient's dtype if wider.

    factor: the upstream gradient, a scalar. Zeros, the gradients of ignored tokens, stay zeros for a NaN or infinite
        factor.
    in_place: the result may overwrite the gradient, and overwrites if the dtypes are equal. Whatever the dtypes, the
        gradient then counts as changed, so a second backward raises. On a GPU a factor of 1 costs no pass over the
        memory: the kernel checks the factor, and the host does not wait.
    """
    if in_place:  # in any dtype a second backward raises
        torch.autograd.graph.increment_version(gradient)
    overwrites = in_place and gradient.dtype == dtype
    if use_triton(gradient):
        from . import launch  # imports triton, which a CPU installation may not have

        gradient = gradient.contiguous()
        return launch.scale(
            gradient,
            factor,
            gradient.detach() if overwrites else torch.empty(gradient.shape, dtype=dtype, device=gradient.device),
        )
    if can_read(factor) and not factor.isfinite():
        factor = torch.where(gradient == 0, 1, factor)
    if overwrites:
        return gradient.detach().mul_(factor)
    return (gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * factor).to(dtype)
