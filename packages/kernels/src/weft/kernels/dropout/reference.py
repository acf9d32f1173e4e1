"""dropout in plain torch: the CPU path and the meaning."""

from __future__ import annotations

import torch
from torch import Tensor

from ..random import philox
from ..random.part import Part


def drawn(part: Part, key: int, threshold: int, device: torch.device) -> Tensor:
    """int8 of the sizes of `part`: -1, all bits, where an element's 16 bits are `threshold` or more, and it is kept; else 0."""
    kept = torch.empty(part.sizes, dtype=torch.int8, device=device)

    def transform(words: philox.Words) -> Tensor:
        halves = philox.as_halves(words)
        return torch.ge(halves, threshold - 2**15, out=halves).neg_()  # to a bool it takes ten times as long

    philox.fill(kept, part, key, transform, philox.HALVES)
    return kept


def masked(x: Tensor, kept: Tensor, residual: Tensor | None, *, scale: float) -> Tensor:
    """scale * x where an element is kept, and 0, whatever x is there, where it is not; and the residual added to that.

    x: any strides. kept: as `drawn`. -> its shape and dtype, contiguous. The product is of float32, of float64 for a float64 x.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    bits = torch.int32 if wide.dtype == torch.float32 else torch.int64
    y = kept.to(bits).bitwise_and_(wide.view(bits)).view(wide.dtype).mul_(scale).to(x.dtype)
    return y if residual is None else y.add_(residual)
