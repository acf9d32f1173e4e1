"""Dropout of attention weights: the index of each weight, from which `weft.kernels.dropout` draws."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from weft.mesh import derive_key

from ..dropout.function import quantized
from ..random.part import Part


class Drop(NamedTuple):
    """Dropout of the weights [B, heads, T, S], each named by its index among the global weights [..., heads, T, S].

    Weight (b, h, i, j) has the index offsets[b] + h * head_stride + query_place * row_stride + key_place. It is dropped
    where the 16 bits that `weft.kernels.dropout` draws for this index are below the threshold, and otherwise
    multiplied by the scale.
    """

    key: int  # 64 bits
    threshold: int
    scale: float
    offsets: Tensor  # int64 [B]
    head_stride: int
    row_stride: int
    query_places: Tensor | None = None  # int32 [B or 1, T]; None for first_query + i
    key_places: Tensor | None = None  # int32 [B or 1, S]; None for first_key + j
    first_query: int = 0
    first_key: int = 0


def drop_of(p: float, key: int, name: str | None, part: Part, places: Tensor | None, device: torch.device) -> Drop:
    """The `Drop` of a call whose weights are in `part`, a box [..., heads, T, S] of the global weights.

    p, key, name: as in `weft.kernels.dropout`.
    places: int32 [1, T], the row in `part` of each query. None: query i has row i.
    """
    offsets = torch.full((1,), part.offset, dtype=torch.int64, device=device)
    for size, stride in zip(part.sizes[:-3], part.strides[:-3], strict=True):
        offsets = (offsets.unsqueeze(1) + torch.arange(size, device=device) * stride).flatten()
    threshold, scale = quantized(p)
    number = key if name is None else derive_key(key, name)
    head_stride, row_stride = part.strides[-3:-1]
    return Drop(number, threshold, scale, offsets, head_stride, row_stride, places)
