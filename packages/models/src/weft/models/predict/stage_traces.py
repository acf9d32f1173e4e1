"""`StageTraces`: traces for any rows and any sizes of "tp" and "cp", from few runs on shapes.

The bytes, operations and sizes of an event are products of dimensions. Rows, 1 / tp and 1 / cp are each a factor of at
most a single dimension, and the share received by a rank, (tp - 1) / tp, adds a multiple of 1 / tp. Each number is
therefore linear in the rows, in 1 / tp and in 1 / cp, and two sizes give the numbers of all sizes. With more ranks of
"tp" than heads of keys, the heads are replicated, and the real numbers are higher. Numbers with "ep" are linear, too,
on meshes with as few ranks along "dp" as "ep" takes: as many ranks exchange tokens on each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from typing import Any

from ..plan_options import TokenTransport
from .events import Compute, Event, Segment, Start, Trace, Wait
from .plan_runs import KnownRuns
from .plans import Candidate
from .price import fuse, product_bytes
from .trace import times_of
from .workload import Workload

Weights = tuple[tuple[int, Fraction], ...]  # traced sizes, each with the weight of the trace's numbers
STAGE: dict[str, Any] = {"pp": 2, "schedule": "1f1b"}  # fields of candidates whose trace is of a stage with all blocks
ROWS = (2, 3)  # traced for all numbers of rows above 1; a single row differs, because some copies are views then


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTraces:
    """The traces of a workload's candidates: few are run, and the rest is computed from the traces run."""

    workload: Workload
    # The two least sizes above 1 in a search, from which larger sizes follow; () to run each size.
    tp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    num_experts: int = 0  # of a mixture: tokens are divided evenly among them
    _traces: dict[tuple[Candidate, int], Trace] = field(default_factory=dict)
    known: KnownRuns[Trace] = field(init=False)
    _ways: dict[tuple[int, ...], TokenTransport | None] = field(default_factory=dict)  # of `way`
    _sizes: set[int] = field(default_factory=set)  # of the axes of the model's matrices, once known

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", KnownRuns(self.run))  # the dataclass is frozen

    def trace(self, candidate: Candidate, rows: int) -> Trace:
        """The trace of a candidate's step whose microbatches have `rows` rows over all ranks.

        Apart from rounding, each number is at most the number in `Workload.trace`. With dp=1 or "ep", the trace is of
        the passes of the first two microbatches alone, because later collectives depend on the data axes. Raises
        ValueError where the model refuses the candidate.
        """
        key = candidate, rows
        if key not in self._traces:
            self._traces[key] = self.workload.in_buckets(self._sums(candidate, rows))
        return self._traces[key]

    def fused(self, candidate: Candidate, rows: int) -> Trace | None:
        """`trace` as the events run, fused where blocks are compiled; None where the model refuses the candidate."""
        try:
            trace = self.trace(candidate, rows)
        except ValueError:
            return None
        if not self.workload.is_compiled:
            return trace
        return replace(trace, segments=tuple(replace(each, events=tuple(fuse(each.events))) for each in trace.segments))

    def _sums(self, candidate: Candidate, rows: int) -> Trace:
        """`trace` with a sum for each gradient: the number of buckets is not linear, the bytes of a sum are."""
        found = self._derived(candidate, rows)
        if found is None:
            found = self.known.of(*self.workload.run_for(candidate, rows))
            found = replace(found, times=times_of(candidate.microbatches))
        return found

    def runs(self, candidate: Candidate, rows: int) -> list[tuple[Candidate, int]]:
        """The arguments of the calls of `run` from which `trace` follows; [] for a trace made before."""
        if (candidate, rows) in self._traces:
            return []
        parts = self._parts(candidate, rows)
        if not parts:
            return [self.workload.run_for(candidate, rows)]
        return [run for part, count, _ in parts for run in self.runs(part, count)]

    def run(self, candidate: Candidate, rows: int) -> Trace:
        """Run a step on shapes: the first two microbatches' passes alone, where `trace` has no more to tell."""
        return self.workload.run(candidate, rows, only_passes=_has_only_passes(candidate))

    def _derived(self, candidate: Candidate, rows: int) -> Trace | None:
        """`_sums` computed from traces of the least sizes; None where the candidate has to be run."""
        parts = self._parts(candidate, rows)
        if not parts:
            return None
        traces = [self._sums(part, count) for part, count, _ in parts]
        sizes = {"dp": candidate.dp, "cp": candidate.cp, "tp": candidate.tp}
        experts = candidate.ep, 1 if candidate.over_tp else candidate.tp
        return combined(traces, [weight for _, _, weight in parts], sizes, experts)

    def _parts(self, candidate: Candidate, rows: int) -> list[tuple[Candidate, int, Fraction]]:
        """The candidates and rows whose traces add up to a trace, each with a weight; [] where the candidate is run.

        Each of these candidates is run.
        """
        if candidate.ep > 1:
            return self._parts_of_experts(candidate, rows)
        of_rows = ((rows, Fraction(1)),) if rows <= max(ROWS) else tuple(zip(ROWS, line(ROWS, rows), strict=True))
        of_tp, of_cp = self._weights(self.tp, candidate.tp), self._weights(self.cp, candidate.cp)
        if len(of_rows) == len(of_tp) == len(of_cp) == 1 or not self._is_even(candidate):
            return []
        return [
            (replace(candidate, tp=tp, cp=cp), count, of_count * of_tp_size * of_cp_size)
            for (count, of_count), (tp, of_tp_size), (cp, of_cp_size) in product(of_rows, of_tp, of_cp)
        ]

    def _parts_of_experts(self, candidate: Candidate, rows: int) -> list[tuple[Candidate, int, Fraction]]:
        """`_parts` with "ep": tokens of each part come to experts in the same way as those of `rows` rows."""
        on_rank, uneven = divmod(rows, candidate.dp)
        way = self.way(candidate, rows)
        if uneven or way is None or not self._is_even(candidate):
            return []
        of_rows = self._rows_of_experts(candidate, on_rank, way)
        of_tp, of_cp = self._weights(self.tp, candidate.tp), self._weights(self.cp, candidate.cp)
        parts = [
            (folded(replace(candidate, tp=tp, cp=cp)), count, of_count * of_tp_size * of_cp_size)
            for (count, of_count), (tp, of_tp_size), (cp, of_cp_size) in product(of_rows, of_tp, of_cp)
        ]
        # Further ranks along "dp" would be others on other meshes.
        if candidate != folded(candidate) or any(self.way(part, count * part.dp) != way for part, count, _ in parts):
            parts = [(candidate, count, weight) for count, weight in of_rows]
        return [] if len(parts) == 1 else [(part, count * part.dp, weight) for part, count, weight in parts]

    def _rows_of_experts(self, candidate: Candidate, on_rank: int, way: TokenTransport) -> Weights:
        """The rows of a rank to trace, each with a weight: two numbers whose tokens take the `way`, or `on_rank`."""
        first = min(ROWS)
        while first + 1 < on_rank and way != self.way(candidate, first * candidate.dp):
            first *= 2
        points = first, first + 1
        if first + 1 >= on_rank or way != self.way(candidate, points[1] * candidate.dp):
            return ((on_rank, Fraction(1)),)
        return tuple(zip(points, line(points, on_rank), strict=True))

    def way(self, candidate: Candidate, rows: int) -> TokenTransport | None:
        """The way of tokens to experts in a microbatch of `rows` rows over all ranks; None where not known before."""
        sizes = candidate.dp, candidate.cp, candidate.tp, candidate.ep, candidate.over_tp, rows
        if sizes not in self._ways:
            experts = self.workload.plan_of(candidate, rows).experts
            self._ways[sizes] = None if experts is None else experts.tokens
        return self._ways[sizes]

    def _weights(self, least: Sequence[int], size: int) -> Weights:
        if len(least) < 2 or size in (1, *least):
            return ((size, Fraction(1)),)
        of_inverses = line([Fraction(1, each) for each in least], Fraction(1, size))
        return tuple(zip(least, of_inverses, strict=True))

    def _is_even(self, candidate: Candidate) -> bool:
        """Whether "tp" and "cp" cut tokens and parameters evenly, so that all numbers are linear.

        Under ulysses a rank receives (cp - 1) / cp**2 of a tensor, which is not linear in 1 / cp.
        """
        tp, cp = candidate.tp, candidate.cp
        if candidate.context == "ulysses" and cp not in (1, *self.cp):
            return False
        if not self._sizes:
            self._sizes.update(
                size for each in self.workload.model.parameters() if each.dim() > 1 for size in each.shape
            )
        parts = 2 * cp * tp * max(1, self.num_experts)
        return self.workload.tokens % parts == 0 and all(size % tp == 0 for size in self._sizes)


def folded(candidate: Candidate) -> Candidate:
    """The candidate with as few ranks along "dp" as "ep" takes beside "cp", and "tp" where experts are over "tp"."""
    inner = candidate.cp * (candidate.tp if candidate.over_tp else 1)
    return replace(candidate, dp=candidate.ep // math.gcd(candidate.ep, inner))


def least_two(sizes: Iterable[int]) -> tuple[int, ...]:
    """The two least of an axis' sizes above 1, for `StageTraces`."""
    return tuple(sorted({*sizes} - {1})[:2])


def line(points: Sequence[int | Fraction], at: int | Fraction) -> tuple[Fraction, Fraction]:
    """The weights by which a line's values at two `points` add up to the line's value `at` a third point."""
    first, second = points
    weight = Fraction(at - first) / (second - first)
    return 1 - weight, weight


def _has_only_passes(candidate: Candidate) -> bool:
    return candidate.dp == 1 or candidate.ep > 1


def combined(
    traces: Sequence[Trace], weights: Sequence[Fraction], sizes: Mapping[str, int], experts: tuple[int, int] = (1, 1)
) -> Trace | None:
    """The trace whose numbers are the weighted sums of the traces' numbers, rounded down.

    None for traces that differ in events, and not in numbers alone.
    sizes: of the mesh's axes, outermost first, for the groups of collectives. experts: size and stride of "ep".
    """
    divisor = math.lcm(*(weight.denominator for weight in weights))
    factors = [int(weight * divisor) for weight in weights]

    rounded = math.ceil(sum(map(abs, weights)))  # bytes: a trace's shares of a tensor are rounded

    def total(numbers: Sequence[int]) -> int:
        return sum(map(int.__mul__, factors, numbers)) // divisor

    def event(events: Sequence[Event]) -> Event:
        first, counted = events[0], list[Any](events)  # all of the type of the first: see `_form`
        if isinstance(first, Wait):
            return first
        nbytes = total([each.nbytes for each in counted])
        if isinstance(first, Start):
            nbytes = max(0, nbytes - rounded)
            if len({(each.size, each.stride) for each in counted}) == 1:
                return replace(first, nbytes=nbytes)  # no traced size changes the group
            if first.axes == ("ep",):
                return replace(first, nbytes=nbytes, size=experts[0], stride=experts[1])
            size = math.prod(sizes[axis] for axis in first.axes)
            axes = list(sizes)
            inner = axes[1 + max(map(axes.index, first.axes)) :]
            return replace(first, nbytes=nbytes, size=size, stride=math.prod(sizes[axis] for axis in inner))
        products = tuple(
            tuple(map(total, zip(*each, strict=True))) for each in zip(*(each.sizes for each in counted), strict=True)
        )
        # In a trace with a square operand, the operand and the transpose count once.
        if first.kind == "product" and len({*map(_squares, (products, *(each.sizes for each in counted)))}) > 1:
            nbytes = min(nbytes, sum(product_bytes(each, first.dtype) for each in products))
        flops = total([each.flops for each in counted])
        return replace(first, nbytes=nbytes, flops=flops, sizes=products)

    if len({tuple(map(_form, trace.segments)) for trace in traces}) > 1:
        return None
    segments = tuple(
        replace(each[0], events=tuple(map(event, zip(*(segment.events for segment in each), strict=True))))
        for each in zip(*(trace.segments for trace in traces), strict=True)
    )
    return replace(traces[0], segments=segments, message_bytes=total([each.message_bytes for each in traces]))


def _squares(products: Sequence[Sequence[int]]) -> tuple[tuple[bool, bool, bool], ...]:
    """Which operands of products (batch, M, N, K) are square."""
    return tuple((M == N, N == K, M == K) for _, M, N, K in products)


def _form(segment: Segment) -> tuple[object, ...]:
    """A segment without numbers: equal for segments that `combined` can add."""
    events = tuple(
        (each.name, each.part, each.kind, each.dtype, each.num_launches, *map(len, each.sizes))
        if isinstance(each, Compute)
        else (each.kind, each.axes, each.purpose)
        if isinstance(each, Start)
        else ()
        for each in segment.events
    )
    return segment.phase, segment.microbatch, segment.blocks, segment.place, events
