"""Tells where the host would wait for a device."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class NoReads(TorchDispatchMode):
    """Refuses what would bring a number of a tensor to the host, where a device would be waited for."""

    READING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique", "masked_select")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to its local tensor comes by here
        name = func.__name__.partition(".")[0]
        assert name not in self.READING, f"{name} makes the host wait"
        return func(*args, **(kwargs or {}))
