"""The keys each query sees, in two forms: ranges for kernels and plain torch, and calls of torch's attention."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from . import stretches
from .ranges import Ranges, ranges_from_keys


class Visible(Protocol):
    """The keys each query sees. Each form is computed when first read."""

    @property
    def ranges(self) -> Ranges:
        """The ranges, on the device of the queries."""

    def fused_calls(self, dtype: torch.dtype) -> stretches.FusedCalls:
        """The calls of torch's fused attention for CPUs. dtype: of the queries. Reads values on the host at first."""


class VisibleKeys:
    """A `Visible` of given ranges. Both forms are kept, for all layers of a model."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self._fused_calls: dict[torch.dtype, stretches.FusedCalls] = {}

    @classmethod
    def of(cls, keys: Tensor, count: int) -> VisibleKeys:
        """Make a `VisibleKeys` for `count` keys.

        keys: int32 [queries, 2], the first key each query sees, and the key after the last.
        """
        return cls(ranges_from_keys(keys.unsqueeze(0), count))

    def to(self, device: torch.device) -> VisibleKeys:
        """A copy with the ranges on `device`."""
        return VisibleKeys(Ranges(*(each.to(device) for each in self.ranges)))

    def fused_calls(self, dtype: torch.dtype) -> stretches.FusedCalls:
        """The calls of torch's fused attention for CPUs; see `Visible.fused_calls`."""
        if dtype not in self._fused_calls:
            T, S = (each.shape[1] for each in self.ranges)
            self._fused_calls[dtype] = stretches.fused_calls_of(self.ranges.keys, T, S, True, dtype)
        return self._fused_calls[dtype]
