"""The key-value cache of one attention layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.reshard import layout_of
from weft.reshard.extension import wrap

from ...dispatch.arguments import described, is_int


class KeyValueCache:
    """The keys and values of one layer's past tokens, read and extended by `attention(..., cache=cache)`.

    capacity: the most tokens of a sequence the cache can hold.
    length: the number of tokens now in the cache.

    Memory for the full capacity is allocated at the first call. On a mesh, the cache has the layout of the keys: each
    rank holds the rank's own heads.
    """

    def __init__(self, capacity: int) -> None:
        if not (is_int(capacity) and capacity >= 1):
            raise ValueError(f"KeyValueCache: capacity is {described(capacity)}; give a number of tokens, 1 or more")
        self.capacity, self.length = capacity, 0
        self._tensors: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        return f"KeyValueCache({self.length} of {self.capacity} tokens)"

    def room_for(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """The memory of cached keys and values, each [..., capacity, kv_heads * D]. The first call allocates.

        key: the keys of the new tokens. Raises ValueError if these do not fit behind the `length` cached tokens, or
        if `key` and the cached keys differ in dtype or in any size but the number of tokens.
        """
        new = key.shape[-2]
        if self.length + new > self.capacity:
            raise ValueError(
                f"{self!r} has no room for {new} more; make a cache with capacity {self.length + new} or more"
            )
        if self._tensors is None:
            self._tensors = _allocated(key, self.capacity), _allocated(key, self.capacity)
        keys, shape = self._tensors[0], key.shape
        if keys.shape[:-2] != shape[:-2] or keys.shape[-1] != shape[-1] or keys.dtype != key.dtype:
            raise ValueError(
                f"{self!r} holds keys of shape {(*keys.shape[:-2], ..., keys.shape[-1])} and {keys.dtype}, got "
                f"{tuple(key.shape)} and {key.dtype}; make a cache for each batch"
            )
        return self._tensors


def _allocated(key: Tensor, capacity: int) -> Tensor:
    """An uninitialized tensor like `key`, with `capacity` tokens."""
    local = key.to_local() if isinstance(key, DTensor) else key
    # On ranks outside the mesh the local tensor is empty and has one dim.
    sizes = (*local.shape[:-2], capacity, local.shape[-1]) if local.ndim == key.ndim else local.shape
    with torch.inference_mode(False):  # a tensor made in inference mode can be written only in inference mode
        room = local.new_empty(sizes)
    return wrap(room, layout_of(key), (*key.shape[:-2], capacity, key.shape[-1])) if isinstance(key, DTensor) else room
