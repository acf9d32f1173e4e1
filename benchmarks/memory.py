"""Counts a computation's memory and GEMM flop on tensors without data, so that results are the same on any machine."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(TorchDispatchMode):
    """Counts, within the context, `peak_bytes` (the peak memory of tensors made inside) and `gemm_flop`."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes, self.gemm_flop = 0, 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the tensors alive now."""
        self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
        return sum(size for _, size in self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        if func is torch.ops.aten.addmm.dtype_out:  # on meta tensors, torch 2.11 mistakes out_dtype for beta
            made = kwargs["out"]
        else:
            made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in given:
                storage = each.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        if func.__name__.partition(".")[0] in ("mm", "addmm"):
            left, right = [each for each in args if isinstance(each, Tensor)][-2:]
            self.gemm_flop += 2 * math.prod(left.shape) * right.shape[1]
        return made


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")
