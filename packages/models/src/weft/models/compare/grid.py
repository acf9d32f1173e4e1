"""The blocks of a global tensor in a digest. The blocks depend on the tensor's shape alone, never on a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product

SKETCHES = 4  # signed sums of a block


def parts_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The number of parts of each dim: 4 for a vector, 4 x 4 for a matrix, 2 x 2 x 4 for activations [B, T, H].

    Tensors of more dims are cut in the first two and the last. At most 16 blocks; no dim has more parts than elements.
    """
    if len(shape) <= 2:
        most = [4] * len(shape)
    else:
        most = [2, 2, *[1] * (len(shape) - 3), 4]
    return tuple(max(1, min(part, size)) for part, size in zip(most, shape, strict=True))


def count_blocks(shape: Sequence[int]) -> int:
    """The number of blocks of a tensor; 1 for a scalar."""
    return math.prod(parts_of(shape))


def block_slices(shape: Sequence[int]) -> list[tuple[slice, ...]]:
    """The slice of each block in the global tensor, in the blocks' order: the last dim's parts run fastest."""
    cuts = []
    for size, parts in zip(shape, parts_of(shape), strict=True):
        edges = [-(-part * size // parts) for part in range(parts + 1)]
        cuts.append([slice(start, stop) for start, stop in pairwise(edges)])
    return list(product(*cuts))
