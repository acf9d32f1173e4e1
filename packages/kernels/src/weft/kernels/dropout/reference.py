"""dropout in plain torch: the CPU path and the meaning."""

from __future__ import annotations

import torch
from torch import Tensor

from ..random import philox
from ..random.part import Part


def masked(x: Tensor, residual: Tensor | None, part: Part, key: int, *, threshold: int, scale: float) -> Tensor:
    """scale * x where an element's 32 bits are `threshold` or more, and 0, whatever x is there, where they are less; and the
    residual added to that.

    x: any strides, the elements `part` of the global tensor. -> its shape and dtype, contiguous.
    The product is of float32, of float64 for a float64 x.
    """
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    philox.fill(keep, part, key, lambda block: block >= threshold)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = torch.where(keep, wide * scale, 0).to(x.dtype)
    return y if residual is None else y.add_(residual)
