"""The keys and values that attention reads on from."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.reshard import layout_of
from weft.reshard.running.dtensor import wrap


class KeyValueCache:
    """Keys and values of the tokens that one layer's attention has read, in memory that is taken once, at its first call.

    capacity: tokens of a sequence that there is room for. length: those that are there. They lie as the keys that come: on a
    mesh each rank has those of its heads.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"KeyValueCache: capacity is {capacity}; it is the tokens of a sequence, 1 or more")
        self.capacity, self.length = capacity, 0
        self._kept: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        return f"KeyValueCache({self.length} of {self.capacity} tokens)"

    def room_for(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Where keys and values [..., capacity, kv_heads * D] are kept, with room for those of `key`'s tokens.

        Raises ValueError where there is none, or `key` differs in more than the tokens from those that are there.
        """
        new = key.shape[-2]
        if self.length + new > self.capacity:
            raise ValueError(
                f"{self!r} has no room for {new} more; make it with the capacity {self.length + new} or more"
            )
        if self._kept is None:
            self._kept = _room(key, self.capacity), _room(key, self.capacity)
        keys, shape = self._kept[0], key.shape
        if keys.shape[:-2] != shape[:-2] or keys.shape[-1] != shape[-1] or keys.dtype != key.dtype:
            raise ValueError(
                f"{self!r} was made of keys {(*keys.shape[:-2], ..., keys.shape[-1])} of {keys.dtype}, got "
                f"{tuple(key.shape)} of {key.dtype}; make one for each batch"
            )
        return self._kept


def _room(key: Tensor, capacity: int) -> Tensor:
    """Memory for keys as `key` with `capacity` tokens."""
    local = key.to_local() if isinstance(key, DTensor) else key
    sizes = (
        (*local.shape[:-2], capacity, local.shape[-1]) if local.ndim == key.ndim else local.shape
    )  # outside the mesh
    with torch.inference_mode(False):  # memory that is born in it could be written in it alone
        room = local.new_empty(sizes)
    return wrap(room, layout_of(key), (*key.shape[:-2], capacity, key.shape[-1])) if isinstance(key, DTensor) else room
