"""Dropout in plain torch: the CPU path, and the definition for the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..random import philox
from ..random.part import Part


def drawn(part: Part, key: int, threshold: int, device: torch.device) -> Tensor:
    """The dropout mask of the elements in `part`, an int8 tensor: -1 (all bits set) where kept, 0 where dropped.

    An element is kept where its 16 random bits are `threshold` or more.
    """
    kept = torch.empty(part.sizes, dtype=torch.int8, device=device)

    def transform(words: philox.Words) -> Tensor:
        halves = philox.as_halves(words)
        return torch.ge(halves, threshold - 2**15, out=halves).neg_()  # comparing into a bool takes ten times as long

    philox.fill(kept, part, key, transform, philox.HALVES)
    return kept


def masked(x: Tensor, kept: Tensor, residual: Tensor | None, *, scale: float) -> Tensor:
    """scale * x for kept elements and 0 for dropped ones, even infinite or NaN; plus the residual, unless None.

    x: any strides. kept: a mask from `drawn`. Returns a contiguous tensor of x's shape and dtype; the product is
    computed in float32, or in float64 for a float64 x.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    bits = torch.int32 if wide.dtype == torch.float32 else torch.int64
    y = kept.to(bits).bitwise_and_(wide.view(bits)).view(wide.dtype).mul_(scale).to(x.dtype)
    return y if residual is None else y.add_(residual)
