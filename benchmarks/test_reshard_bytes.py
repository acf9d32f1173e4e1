"""Counts the bytes received by the busiest rank in a layout change, relative to the fewest possible: Weft and DTensor.

No data moves. Weft's plans state the received bytes. DTensor's collectives are counted in a fake world of 64 ranks,
for both of DTensor's planners. DTensor's all-to-all is counted as an all-to-all, although DTensor issues more bytes on
CPUs. Pairs which need no bytes are left out of the ratios. The times are host times for planning a pair for the first
time.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pytest
import torch
from weft.mesh import Layout, ProcessMesh
from weft.reshard import plan

from benchmarks import history, picture
from benchmarks.conftest import Tell
from benchmarks.dtensor_bytes import Counted, counted, placements
from benchmarks.record import keep_rows
from benchmarks.reshard_cases import CASES, Case, Pair, lower_bound_bytes
from benchmarks.timing import Timed

MATRIX_PAIRS, OTHER_PAIRS = 6561, 729  # the most pairs of a case; for matrices all pairs
SEARCHED_PAIRS = 100  # for DTensor's search, which takes tens of milliseconds a pair on four axes
WEFT, DEFAULT, SEARCH = "Weft", "DTensor", "DTensor, min-cost"


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of one engine on one case. Ratios are bytes received over the bound, for pairs which need bytes."""

    engine: str
    mesh: str
    shape: tuple[int, ...]
    pairs: int
    above: float  # the share of pairs above the bound
    mean: float
    max: float
    mean_of_all: float  # the mean if pairs which need and receive nothing count as 1
    mean_on_cpu: float  # the mean with each all-to-all as an all-gather and a slice, as DTensor does on CPUs
    unneeded: int  # the number of pairs which need nothing, but receive something
    planning: Timed
    ratios: dict[str, int]  # the number of pairs with each ratio


def measured() -> list[Summary]:
    """The results of every engine on every case."""
    work = [(case, case.pairs(MATRIX_PAIRS if len(case.shape) == 2 else OTHER_PAIRS)) for case in CASES]
    searched = [(case, pairs[:SEARCHED_PAIRS]) for case, pairs in work if len(case.shape) == 2]
    bounds = {case: [lower_bound_bytes(case, *pair) for pair in pairs] for case, pairs in work}
    summaries = [_summary(WEFT, case, bounds[case], _weft(case, pairs, bounds[case])) for case, pairs in work]
    for engine, some in ((DEFAULT, work), (SEARCH, searched)):
        for (case, _), each in zip(some, counted(some, min_cost=engine == SEARCH), strict=True):
            summaries.append(_summary(engine, case, bounds[case], each))
    return summaries


@pytest.mark.timeout(600)
def test_reshard_bytes(tell: Tell) -> None:
    summaries = tell.measuring(measured)
    _print(summaries)
    for row in summaries:
        case = f"{row.mesh}, {' x '.join(map(str, row.shape))} fp32"
        figures = {"bytes_over_bound_mean": row.mean, "bytes_over_bound_max": row.max, "share_above_bound": row.above}
        tell(case, row.engine, "count", unneeded=row.unneeded, pairs=row.pairs, **figures)
        tell(f"planning, {case}", row.engine, "host_time", **row.planning.figures)
    rows = [asdict(summary) for summary in summaries]
    for row in rows:
        del row["planning"]  # times would make the file differ between machines
    # An unchanged file and its picture are left alone.
    if keep_rows(file := history.RESULTS / "reshard_bytes.json", rows):
        print(picture.draw(file))
    worse = [row for row in summaries if row.engine == WEFT and (row.max > 1 or row.unneeded)]
    assert not worse, "Weft receives more than the bound on " + ", ".join(f"{row.mesh} {row.shape}" for row in worse)


def _weft(case: Case, pairs: Sequence[Pair], bounds: Sequence[int]) -> Counted:
    mesh = ProcessMesh.grid(**dict(zip("abcd", case.mesh, strict=False)))
    received, seconds = [], []
    for (src, dst), bound in zip(pairs, bounds, strict=True):
        layouts = Layout(mesh, placements(src)), Layout(mesh, placements(dst))
        start = time.perf_counter()
        made = plan(*layouts, case.shape, torch.float32)
        seconds.append(time.perf_counter() - start)
        assert made.lower_bound_bytes == bound, f"{made}: Weft's bound differs from the bound computed from slices"
        received.append(made.max_received_bytes)
    return Counted(tuple(received), tuple(received), Timed(tuple(seconds)))


def _summary(engine: str, case: Case, bounds: Sequence[int], counts: Counted) -> Summary:
    """The summary of a case. bounds: for the pairs in `counts`, in the same order; may have more."""
    bounds = bounds[: len(counts.received)]
    ratios = [received / bound for received, bound in zip(counts.received, bounds, strict=True) if bound]
    on_cpu = [received / bound for received, bound in zip(counts.on_cpu, bounds, strict=True) if bound]
    nothing = [received for received, bound in zip(counts.received, bounds, strict=True) if not bound]
    idle = nothing.count(0)
    return Summary(
        engine=engine,
        mesh=str(case),
        shape=case.shape,
        pairs=len(bounds),
        above=sum(ratio > 1 for ratio in ratios) / len(ratios),
        mean=statistics.fmean(ratios),
        max=max(ratios),
        mean_of_all=(sum(ratios) + idle) / (len(ratios) + idle),
        mean_on_cpu=statistics.fmean(on_cpu),
        unneeded=len(nothing) - idle,
        planning=counts.planning,
        ratios={f"{ratio:.4g}": count for ratio, count in sorted(Counter(ratios).items())},
    )


def _print(summaries: Sequence[Summary]) -> None:
    print("\nbytes received by the busiest rank over the lower bound; planning in CPU time of the host")
    for shape in dict.fromkeys(summary.shape for summary in summaries):
        words = ", ".join(["R", *(f"S{dim}" for dim in range(len(shape)))])
        print(f"\n{' x '.join(map(str, shape))} fp32, layouts of {{{words}}}")
        print(
            f"{'mesh':9}{'engine':19}{'pairs':>6}{'above bound':>13}{'mean':>8}{'max':>8}"
            f"{'mean*':>8}{'mean**':>8}{'unneeded':>10}{'planning, ms':>14}"
        )
        for row in sorted((row for row in summaries if row.shape == shape), key=lambda row: _place(row.mesh)):
            print(
                f"{row.mesh:9}{row.engine:19}{row.pairs:6}{row.above:13.0%}{row.mean:8.2f}{row.max:8.2f}"
                f"{row.mean_of_all:8.2f}{row.mean_on_cpu:8.2f}{row.unneeded:10}{row.planning.median * 1e3:14.2f}"
            )
    print("\n*  counting pairs that need nothing, and get nothing, as 1")
    print("** with all-to-all as an all-gather and a slice, as DTensor does it on CPUs")
    print("unneeded: pairs that need nothing, yet something is received")


def _place(mesh: str) -> int:
    return [str(case) for case in CASES].index(mesh)
