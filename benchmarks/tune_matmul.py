"""`python -m benchmarks.tune_matmul`: measures how products are cut on this GPU, and writes the table that `weft.kernels` reads.

Of each class of sizes the fastest configuration beside torch's GEMM, followed by the same epilogue compiled. What was measured before, on
other chips or of other classes, stays in the table. The classes are those of `benchmarks.products`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from weft.kernels.matmul.configurations import (
    BY_POINTERS,
    FLAT,
    LARGE,
    MIDDLE,
    TABLE,
    Class,
    Configuration,
    Kind,
    Measured,
    halved,
    read,
    write,
)

from benchmarks.products import KERNEL, SHAPES, TOKENS, TORCH, Factors, Way, check, gated, plain, truths, with_gelu
from benchmarks.timing import Clock, Device, in_turn

CANDIDATES = (
    LARGE,
    replace(LARGE, tile_m=256, tile_n=128),
    replace(LARGE, group_m=16),
    replace(LARGE, stages=4, tile_k=32),
    MIDDLE,
    replace(MIDDLE, warps=8),
    replace(MIDDLE, stages=3, parts=1, specialized=True),
    replace(MIDDLE, splits=2),
    replace(MIDDLE, splits=4),
    FLAT,
    BY_POINTERS,
)
Ways = Callable[[Factors, Configuration | None], dict[str, Way]]
# Of each kind of `Class` what is measured, and its name in `truths`.
KINDS: Mapping[Kind, tuple[Ways, str]] = {
    "plain": (plain, "plain"),
    "fused": (with_gelu, "gelu"),
    "gated": (gated, "swiglu"),
}


def fastest(
    of: Class, sizes: tuple[int, int, int], candidates: Iterable[Configuration], device: str, clock: Clock, where: str,
    rounds: int = 10,
) -> Measured:  # fmt: skip
    """The candidate that took the least time of a product of these sizes; one that the chip cannot run is none.

    Raises Inaccurate for one that is wrong.
    """
    given = Factors.of(*sizes, device)
    ways_of, name = KINDS[of.kind]
    truth = truths(given)[name]
    named: dict[str, Configuration] = {}
    ways: dict[str, Way] = {TORCH: ways_of(given, None)[TORCH]}
    for candidate in candidates:
        way = ways_of(given, candidate)[KERNEL]
        made = _made(way)
        if made is not None:
            check(str(candidate), made, truth)
            named[str(candidate)], ways[str(candidate)] = candidate, way
    with torch.no_grad():
        timed = in_turn(ways, clock, rounds=rounds, replayed=())
    best = min(named, key=lambda name: timed[name].median)
    return Measured(
        of=of, configuration=named[best], seconds=timed[best].median, torch_seconds=timed[TORCH].median, where=where
    )


def _made(way: Way) -> Tensor | None:
    from triton.runtime.errors import OutOfResources

    try:
        return way()
    except OutOfResources:  # of shared memory, on a smaller chip
        return None


def tune(table: Path = TABLE) -> None:
    """Raises RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU to measure on; run this where there is one")
    import triton
    from weft.kernels.matmul.launch import chip_of

    chip, _ = chip_of(torch.device("cuda", torch.cuda.current_device()))
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    rows, clock = read(table), Device()
    for kind in KINDS:
        candidates = list(dict.fromkeys(map(halved, CANDIDATES))) if kind == "gated" else CANDIDATES
        for M in TOKENS:
            for N, K in sorted(set(SHAPES.values())):
                of = Class.of(chip, torch.bfloat16, kind, M, N, K)
                rows[of] = row = fastest(of, (M, N, K), candidates, "cuda", clock, where)
                write(rows, table)  # what is found is kept, whatever comes next
                print(f"{row.torch_seconds / row.seconds:6.1%} of torch's speed: {of}, {row.configuration}", flush=True)


if __name__ == "__main__":
    tune()
