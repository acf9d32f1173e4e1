"""The same layout changes by `weft.reshard.reshard` and by `DTensor.redistribute`, as ratios of time.

Four gloo processes on a CPU, mesh 2 x 2, 64 MB of float32. Both are first checked against slices of the whole tensor,
then timed in turn. These are times of memory copies and of gloo's connections on one host; they say nothing of a GPU.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, plan, reshard
from weft.reshard.dtensor import torch_layout

from tests.support.pool import Pool

RANKS, ROUNDS = 4, 5
SHAPE = (4096, 4096)  # 64 MB of float32
MESH = ProcessMesh.grid(a=2, b=2)
SHARDED = [
    ", ".join(f"{axis}: {p}" for axis, p in zip("ab", pair, strict=True))
    for pair in itertools.product(("R", "S(0)", "S(1)"), repeat=2)
]
PAIRS = [
    *itertools.permutations(SHARDED, 2),
    ("a: P, b: R", "a: R, b: R"),
    ("a: P, b: P", "a: R, b: R"),
    ("a: P, b: P", "a: S(0), b: S(0)"),
    ("a: P, b: S(0)", "a: S(1), b: S(0)"),
    ("a: S(0), b: P", "a: S(1), b: S(0)"),
]
Seconds = dict[tuple[str, str], dict[str, list[float]]]


def measure() -> Seconds:
    """On every rank: seconds of each way of each pair, round by round."""
    logging.disable(logging.WARNING)  # DTensor says of some pairs that it moves more than it must
    whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    found: Seconds = {}
    for number, (src, dst) in enumerate(PAIRS):
        before, after = Layout(MESH, src), Layout(MESH, dst)
        x = distribute(whole, before)
        _, placements = torch_layout(after, "cpu")
        ways: dict[str, Callable[[], DTensor]] = {
            "weft": lambda x=x, after=after: reshard(x, placements=after),
            "dtensor": lambda x=x, placements=placements: x.redistribute(placements=placements),
        }
        if number % 4 == 0:
            ways["dtensor again"] = ways["dtensor"]
        mine = whole[after.local_slices(SHAPE, dist.get_rank())]
        for name, way in ways.items():
            assert torch.equal(way().to_local(), mine), f"{name}: {src} -> {dst}"
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(ROUNDS):
            names = list(ways)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                dist.barrier()
                start = time.perf_counter()
                result = ways[name]().to_local()
                seconds[name].append(time.perf_counter() - start)
                del result
        found[src, dst] = seconds
    return found


@pytest.mark.timeout(600)
def test_reshard_time_against_redistribute(pool: Pool) -> None:
    ranks = pool.run(measure, ranks=RANKS, timeout=580)
    print(f"\n{SHAPE[0]} x {SHAPE[1]} float32 on 2 x 2 gloo processes, CPU time, {ROUNDS} rounds")
    print(f"{'from':18} {'to':18} {'weft, ms':>9} {'dtensor, ms':>12} {'ratio (lowest - highest)':>25}")
    ratios, floor = [], []
    for src, dst in PAIRS:
        # A change lasts until its slowest rank is done.
        slowest = {
            name: [max(each) for each in zip(*(rank[src, dst][name] for rank in ranks), strict=True)]
            for name in ranks[0][src, dst]
        }
        paired = sorted(a / b for a, b in zip(slowest["weft"], slowest["dtensor"], strict=True))
        moves = plan(Layout(MESH, src), Layout(MESH, dst), SHAPE, torch.float32).max_received_bytes > 0
        if moves:
            ratios.append(statistics.median(paired))
        if "dtensor again" in slowest:
            floor.append(
                statistics.median(a / b for a, b in zip(slowest["dtensor again"], slowest["dtensor"], strict=True))
            )
        times = [1e3 * statistics.median(slowest[name]) for name in ("weft", "dtensor")]
        spread = f"{statistics.median(paired):.2f} ({paired[0]:.2f} - {paired[-1]:.2f})" if moves else "moves nothing"
        print(f"{src:18} {dst:18} {times[0]:>9.1f} {times[1]:>12.1f} {spread:>25}")
    mean, noise = (math.exp(statistics.fmean(map(math.log, each))) for each in (ratios, floor))
    print(
        f"geometric mean of weft / dtensor over the {len(ratios)} that move: {mean:.2f}; of dtensor with itself: {noise:.2f}"
    )
    assert mean < 1, "fewer bytes take less time"
