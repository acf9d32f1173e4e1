"""Which keys each query sees, in the two forms that attention computes from."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from . import stretches
from .ranges import Ranges, ranges_from_keys


class Visible(Protocol):
    """Which keys each query sees. Each form is made where it is first read."""

    @property
    def ranges(self) -> Ranges:
        """Two numbers a query and two numbers a key, on the device of the queries."""

    def batch(self, dtype: torch.dtype) -> stretches.Batch:
        """The calls of torch's fused attention on a CPU. dtype: of the queries. The first call reads on the host."""


class VisibleKeys:
    """Which of some keys each query sees, made once for all layers of a model."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self._batches: dict[torch.dtype, stretches.Batch] = {}

    @classmethod
    def of(cls, keys: Tensor, count: int) -> VisibleKeys:
        """Of `count` keys. keys: int32 [queries, 2], the first key that each query sees, and the key after the last."""
        return cls(ranges_from_keys(keys.unsqueeze(0), count))

    def to(self, device: torch.device) -> VisibleKeys:
        """The same on a device."""
        return VisibleKeys(Ranges(*(each.to(device) for each in self.ranges)))

    def batch(self, dtype: torch.dtype) -> stretches.Batch:
        """See `Visible.batch`."""
        if dtype not in self._batches:
            T, S = (each.shape[1] for each in self.ranges)
            self._batches[dtype] = stretches.batch_of(self.ranges.keys, T, S, True, dtype)
        return self._batches[dtype]
