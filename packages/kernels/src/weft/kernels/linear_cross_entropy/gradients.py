"""The gradients of a chunked product: each chunk's are added where they belong, those of weight and bias in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import use_triton
from .chunks import Product

Wanted = tuple[torch.dtype | None, ...]  # of the gradients of input, weight and bias; None: not wanted


class Sums:
    """The gradients of `Product.x`, `weight` and `bias` for as many rows as were added; None for those not wanted.

    dx has x's dtype. dweight and dbias are float32 (float64 for float64), so that the error does not grow with the number
    of chunks; but dweight of a single chunk is what its GEMM gives, in x's dtype where that is wanted.
    """

    def __init__(self, product: Product, wanted: Wanted, chunks: list[slice]) -> None:
        x, weight = product.x, product.weight
        self._product = product
        self._of_weight, self._of_bias = (each is not None for each in wanted[1:])
        self._rounded = len(chunks) == 1 and wanted[1] == x.dtype
        self._wide = torch.promote_types(x.dtype, torch.float32)
        self.dx = None if wanted[0] is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.dweight: Tensor | None = None
        self.dbias: Tensor | None = None
        if not chunks:
            self.dweight = torch.zeros_like(weight) if self._of_weight else None
            self.dbias = torch.zeros(len(weight), dtype=self._wide, device=x.device) if self._of_bias else None

    def add(self, rows: slice, dlogits: Tensor) -> None:
        """Adds what the gradient [n, V] of the logits of some rows brings; a GEMM for dx, one for dweight."""
        if self.dx is not None:
            torch.mm(dlogits, self._product.weight, out=self.dx[rows])
        if self._of_weight:
            self.dweight = self._added(self.dweight, dlogits, self._product.x[rows])
        if self._of_bias:
            part = dlogits.sum(0, dtype=self._wide)
            self.dbias = part if self.dbias is None else self.dbias.add_(part)

    def _added(self, total: Tensor | None, dlogits: Tensor, x: Tensor) -> Tensor:
        """total + dlogits.T @ x, in the memory of total."""
        if self._rounded:
            out = torch.empty_like(self._product.weight)
            return torch.mm(dlogits.mT, x, out=out)  # out=, so that autocast stays out
        beta = 1
        if total is None:
            total, beta = torch.empty_like(self._product.weight, dtype=self._wide), 0
        if dlogits.dtype == self._wide:
            return torch.addmm(total, dlogits.mT, x, beta=beta, out=total)
        if dlogits.device.type == "cpu":  # which has no GEMM of narrow factors and a wide sum
            return torch.addmm(total, dlogits.mT.to(self._wide), x.to(self._wide), beta=beta, out=total)
        return torch.addmm(total, dlogits.mT, x, out_dtype=self._wide, beta=beta, out=total)


def scaled(part: Tensor, factor: Tensor, dtype: torch.dtype, in_place: bool) -> Tensor:
    """part * factor in `dtype`, multiplied in the wider of part's dtype and float32, not in bfloat16.

    A factor that is no number leaves zeros alone, so that tokens to ignore keep theirs.
    in_place: in part's memory where that has the dtype; a factor of 1 then costs no pass, and no host waits to learn of it.
    """
    if in_place:
        torch.autograd.graph.increment_version(part)  # a second backward is told
    reused = in_place and part.dtype == dtype
    if use_triton(part):
        from . import launch  # imports triton, which a CPU run may not have

        part = part.contiguous()
        return launch.scale(
            part, factor, part.detach() if reused else torch.empty(part.shape, dtype=dtype, device=part.device)
        )
    if part.device.type == "cpu" and not factor.isfinite():
        factor = torch.where(part == 0, 1, factor)
    if reused:
        return part.detach().mul_(factor)
    return (part.to(torch.promote_types(part.dtype, torch.float32)) * factor).to(dtype)
