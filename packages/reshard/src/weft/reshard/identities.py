"""What a rank holds that has nothing to add to a Partial."""

from __future__ import annotations

import torch


def identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """The value `e` for which `op(e, x) == x`: op is "sum", "product", "min" or "max"."""
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
