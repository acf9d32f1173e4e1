"""Layout changes to measure, and the fewest bytes of each, computed from slices of the global tensor only."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

Placements = tuple[str, ...]  # one word per mesh axis, major axis first: "R", "P", or "S0" for Shard(0)
Pair = tuple[Placements, Placements]
Intervals = tuple[tuple[int, int], ...]  # per dim, start and stop

ITEMSIZE = 4  # fp32
MESHES = ((2, 2), (2, 2, 2), (2, 2, 2, 2), (4, 4, 4))
SHAPES = ((8192, 8192), (512, 512, 256))  # 256 MiB each; divide evenly on all these meshes


@dataclass(frozen=True, slots=True)
class Case:
    """All ordered pairs of the layouts {R, S0, S1, …} of one tensor on one mesh."""

    mesh: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return "x".join(map(str, self.mesh))

    def pairs(self, at_most: int | None = None) -> list[Pair]:
        """The pairs in a fixed shuffled order: all of them, or the first `at_most`."""
        words = ["R", *(f"S{dim}" for dim in range(len(self.shape)))]
        layouts = list(itertools.product(words, repeat=len(self.mesh)))
        pairs = list(itertools.product(layouts, repeat=2))
        random.Random(0).shuffle(pairs)
        return pairs[:at_most]


CASES = tuple(Case(mesh, shape) for shape in SHAPES for mesh in MESHES)


def lower_bound_bytes(case: Case, src: Placements, dst: Placements) -> int:
    """The fewest bytes which the busiest rank must receive.

    A rank must receive all bytes needed in `dst` and not held in `src`; the result is the maximum over all ranks.
    """
    missing = 0
    for coordinate in itertools.product(*(range(size) for size in case.mesh)):
        held, need = slices(case, src, coordinate), slices(case, dst, coordinate)
        missing = max(missing, _volume(need) - _volume(_common(need, held)))
    return missing * ITEMSIZE


def slices(case: Case, layout: Placements, coordinate: tuple[int, ...]) -> Intervals:
    """The shard at a coordinate of the mesh, by nested `torch.chunk`s, the major axis first."""
    parts = [(0, size) for size in case.shape]
    for ranks, word, index in zip(case.mesh, layout, coordinate, strict=True):
        if word.startswith("S"):
            dim = int(word[1:])
            start, stop = parts[dim]
            step = math.ceil((stop - start) / ranks)
            parts[dim] = min(start + index * step, stop), min(start + (index + 1) * step, stop)
    return tuple(parts)


def _common(a: Intervals, b: Intervals) -> Intervals:
    return tuple((max(i, k), min(j, l)) for (i, j), (k, l) in zip(a, b, strict=True))


def _volume(part: Intervals) -> int:
    return math.prod(max(0, stop - start) for start, stop in part)
