"""Identity elements and results of the ops of Partial."""

from __future__ import annotations

import torch
from torch import Tensor


def identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """The identity `e` of an op, with `op(e, x) == x` for every x of the dtype.

    op: "sum", "product", "min" or "max".
    """
    if op == "sum":
        return 0
    if op == "product":
        return 1
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")
    info = torch.iinfo(dtype)
    return info.max if op == "min" else info.min


def reduced(op: str, parts: Tensor) -> Tensor:
    """`parts` reduced by `op` over dim 0, in their own dtype."""
    match op:
        case "sum":
            return parts.sum(0, dtype=parts.dtype)
        case "avg":
            return parts.sum(0, dtype=parts.dtype) / parts.shape[0]
        case "product":
            return parts.prod(0, dtype=parts.dtype)
        case "min":
            return parts.amin(0)
        case _:
            return parts.amax(0)
