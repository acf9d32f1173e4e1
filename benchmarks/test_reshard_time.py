"""Times layout changes: `weft.reshard.reshard` relative to `DTensor.redistribute`.

Runs on four gloo processes on a CPU, a mesh of 2x2, with a tensor of 64 MB. The results of both are checked against
slices of the global tensor. Then both are timed in turn, so that other load on the machine slows both alike. On gloo
DTensor replaces an all-to-all by an all-gather and a slice. The times are not those of a GPU's links.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from weft.mesh import ProcessMesh
from weft.reshard import reshard
from weft.reshard.world.groups import device_mesh

from benchmarks.conftest import Tell
from benchmarks.dtensor_bytes import placements
from benchmarks.record import Spread
from benchmarks.reshard_cases import Case, Pair, Placements, lower_bound_bytes, slices
from tests.support.pool import Pool

CASE = Case((2, 2), (4096, 4096))
RANKS = 4
ROUNDS = 6  # a multiple of the number of ways, 3, so that each way follows each other way equally often
PARTIAL: tuple[Pair, ...] = (
    (("P", "R"), ("R", "R")),
    (("R", "P"), ("R", "S1")),
    (("P", "S1"), ("S0", "S1")),
    (("S0", "P"), ("R", "R")),
    (("P", "P"), ("R", "R")),
    (("P", "P"), ("S0", "S0")),
    (("P", "P"), ("S0", "S1")),
)
Seconds = dict[str, list[float]]  # for each way, the seconds of each round


@dataclass(frozen=True, slots=True)
class Ratio:
    """The times of a pair of layouts."""

    src: str
    dst: str
    moves: bool  # whether the change moves data between ranks
    dtensor: Spread  # DTensor's seconds
    weft: Spread  # Weft's time over DTensor's
    again: Spread  # DTensor's time, measured again, over DTensor's


def measure(pairs: Sequence[Pair]) -> list[Seconds]:
    """Times every pair: Weft, DTensor, and DTensor again as the noise floor. Runs on every rank."""
    return [_timed(pair) for pair in pairs]


def _timed(pair: Pair) -> Seconds:
    mesh = device_mesh(ProcessMesh.grid(a=2, b=2), "cpu")
    src, dst = (placements(layout) for layout in pair)
    tensor = DTensor.from_local(_part(pair[0], addend=True), mesh, src, run_check=False)
    expected = _part(pair[1]) * 3 ** pair[0].count("P")
    ways: dict[str, Callable[[], DTensor]] = {
        "weft": lambda: reshard(tensor, placements=dst),
        "dtensor": lambda: tensor.redistribute(mesh, dst),
    }
    for name, way in ways.items():
        assert torch.equal(way().to_local(), expected), f"{name}, {pair}: differs from slices of the global tensor"
    ways["again"] = ways["dtensor"]
    names = list(ways)
    seconds: Seconds = {name: [] for name in names}
    for number in range(ROUNDS):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _part(layout: Placements, *, addend: bool = False) -> torch.Tensor:
    """This rank's shard of a tensor of small integers, whose sums are exact in fp32.

    addend: return an addend on axes of "P": once or twice the shard, so that both ranks' addends sum to three times it.
    """
    coordinate = divmod(dist.get_rank(), CASE.mesh[1])
    rows, columns = (torch.arange(*bounds, dtype=torch.float32) for bounds in slices(CASE, layout, coordinate))
    part = (rows[:, None] * 31 + columns * 7) % 1021
    times = [1 + index for word, index in zip(layout, coordinate, strict=True) if word == "P" and addend]
    return part * math.prod(times)


@pytest.mark.timeout(600)
def test_reshard_time(pool: Pool, tell: Tell) -> None:
    pairs = [*sorted(CASE.pairs()), *PARTIAL]
    by_rank = tell.measuring(pool.run, measure, pairs, ranks=RANKS, timeout=580)
    ratios = [_ratio(pair, ranks) for pair, ranks in zip(pairs, zip(*by_rank, strict=True), strict=True)]
    moving = [ratio for ratio in ratios if ratio.moves]
    print(f"\nlayout changes of a 64 MB fp32 tensor, mesh 2x2, {RANKS} gloo processes, CPU time, {ROUNDS} rounds")
    print(f"{'':16}{'DTensor, ms (p20 - p80)':>28}{'Weft / DTensor':>22}{'DTensor again':>22}")
    for ratio in [*moving, *(ratio for ratio in ratios if not ratio.moves)]:
        way = f"{ratio.src} -> {ratio.dst}"
        note = "" if ratio.moves else "   moves nothing: not in the mean"
        print(f"{way:16}{_told(ratio.dtensor, 1e3):>28}{_told(ratio.weft):>22}{_told(ratio.again):>22}{note}")
    mean, floor = (statistics.geometric_mean(getattr(each, way).median for each in moving) for way in ("weft", "again"))
    lowest, highest = (choose(each.again.median for each in moving) for choose in (min, max))
    print(f"geometric mean over {len(moving)} pairs: Weft / DTensor {mean:.2f}")
    print(f"noise floor: DTensor again / DTensor {floor:.2f}, of one pair {lowest:.2f} to {highest:.2f}")
    for ratio in moving:
        case = f"{ratio.src} -> {ratio.dst}, 64 MB on 2x2"
        ways = (("Weft", ratio.weft), ("DTensor", ratio.dtensor), ("DTensor, again", ratio.again))
        for way, spread in ways:
            unit = 1.0 if way == "DTensor" else ratio.dtensor.median
            tell(case, way, "host_time", **{f"seconds_{name}": each * unit for name, each in asdict(spread).items()})


def _ratio(pair: Pair, ranks: Sequence[Seconds]) -> Ratio:
    """The times of a pair from the seconds of all ranks. A layout change takes as long as the slowest rank."""
    seconds = {way: [max(each) for each in zip(*(rank[way] for rank in ranks), strict=True)] for way in ranks[0]}
    first = seconds["dtensor"]
    weft, again = (_spread([a / b for a, b in zip(seconds[way], first, strict=True)]) for way in ("weft", "again"))
    return Ratio(
        src="".join(pair[0]),
        dst="".join(pair[1]),
        moves="P" in pair[0] or lower_bound_bytes(CASE, *pair) > 0,
        dtensor=_spread(first),
        weft=weft,
        again=again,
    )


def _spread(values: Sequence[float]) -> Spread:
    low, *_, high = statistics.quantiles(values, n=5)
    return Spread(low, statistics.median(values), high)


def _told(spread: Spread, unit: float = 1) -> str:
    return f"{spread.median * unit:.2f} ({spread.p20 * unit:.2f} - {spread.p80 * unit:.2f})"
