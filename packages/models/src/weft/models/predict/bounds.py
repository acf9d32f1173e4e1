"""Lower bounds of a plan's seconds and bytes: never above the plan's price, and found without tracing the plan.

By these bounds a search proves that unpriced plans are no faster than the results. The bounds hold because the work of
a step is conserved: at best, the ranks divide the work evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from operator import add, sub
from typing import NamedTuple

from ..schedules.schedule import ScheduleName
from ..step.communication import Phase
from .chip import Chip
from .events import Compute, Event, Start, Trace, Wait
from .plans import Candidate

PHASES: tuple[Phase, ...] = ("forward", "backward")


def layers_of_stages(num_layers: int, num_stages: int) -> list[int]:
    """The number of layers of each stage, as PipelinePlan(split="layers") cuts: longer stages first."""
    return [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]


def pipeline_floor(
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    ranks: int,
    microbatches: int,
    schedule: ScheduleName | None,
    message: float = 0.0,
    first_backward: Sequence[float] | None = None,
) -> float:
    """A lower bound of a pipeline's seconds, in any order of the actions.

    forward, backward: seconds of a microbatch on each stage; stage s is on rank s % ranks. message: seconds of a
    message between stages. schedule: None means any schedule but zero_bubble.
    first_backward: seconds of the first microbatch's backward, whose gradients are new; later microbatches add to these
    gradients. None: as `backward`.
    A rank begins after the first microbatch has passed all earlier stages, and computes all microbatches. After the
    rank's last backward, that microbatch passes the earlier stages on the way back. Under zero_bubble the way back is
    not counted, because gradients of weights may be computed meanwhile.
    """
    splits = schedule == "zero_bubble"
    first_backward = backward if first_backward is None else first_backward
    backward = first_backward if microbatches == 1 else backward
    floor, way_in, way_back = 0.0, 0.0, 0.0
    for rank in range(ranks):
        busy = sum(
            microbatches * forward[stage] + (microbatches - 1) * backward[stage] + first_backward[stage]
            for stage in range(rank, len(forward), ranks)
        )
        floor = max(floor, way_in + busy + (0.0 if splits else way_back))
        way_in += forward[rank] + message
        way_back += backward[rank] + message
    passed = sum(forward) + (len(forward) - 1) * message  # a microbatch passes all stages
    return max(floor, passed + (0.0 if splits else sum(first_backward) + (len(forward) - 1) * message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Bytes of a model's parameters, for `weights_floor`. Made by `parameters_of`."""

    total: int
    in_blocks: tuple[int, ...]  # for each block
    experts_in_blocks: tuple[int, ...] = ()  # for each block of a mixture: of `in_blocks`, those of experts
    trained: int  # parameters with gradients
    experts: int = 0  # parameters of experts, which an axis "ep" divides
    itemsize: int = 4  # of a number
    states: float = 2.0  # bytes of optimizer state for each byte of a trained parameter


def weights_floor(
    parameters: Parameters,
    *,
    pp: int,
    tp: int,
    ep: int,
    over_tp: bool,
    data: int,
    zero: int,
    gradients: bool = True,
) -> float:
    """A lower bound of the fullest rank's bytes of parameters, gradients and optimizer states.

    data: dp x cp. over_tp, ep: as of `Candidate`. gradients: whether to count gradients.
    Counts every parameter as divided over "tp". With stages, takes the mean over stages, or the longest stage's blocks
    if larger.
    """
    layers = layers_of_stages(len(parameters.in_blocks), pp) if pp <= len(parameters.in_blocks) else [0]
    most = sum(sorted(parameters.in_blocks)[: layers[0]])  # at least the smallest blocks
    held = max(most, parameters.total / pp) if pp > 1 else parameters.total
    share_trained = parameters.trained / max(1, parameters.total)
    share_experts = parameters.experts / max(1, parameters.total) if ep > 1 else 0.0
    nbytes = 0.0
    for share, parts, ranks in (
        (1 - share_experts, tp, data),
        (share_experts, ep * (1 if over_tp else tp), max(1.0, data * tp / (ep * (1 if over_tp else tp)))),
    ):
        own = held * share / parts
        trained = own * share_trained
        keeps_full = zero < 3 or pp > 1  # a stage keeps gathered parameters until all microbatches are done
        nbytes += own if keeps_full else own / ranks
        nbytes += trained / (ranks if zero > 1 else 1) if gradients else 0.0
        nbytes += parameters.states * trained / (ranks if zero else 1)
    return nbytes


class Seconds(NamedTuple):
    """Seconds of a microbatch's forward and backward, on the device and on the host."""

    forward: float = 0.0  # of the device, waits for collectives included
    backward: float = 0.0
    host_forward: float = 0.0  # of the host, to issue the ops
    host_backward: float = 0.0

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(*map(add, self, other))

    def minus(self, other: Seconds) -> Seconds:
        return Seconds(*map(sub, self, other))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWork:
    """Seconds of the data axes' collectives and of the update, on a rank with all blocks. Made by `DataFloors`."""

    # Of the block with the least seconds:
    gathers: float  # to gather the parameters, in the forward pass of the first microbatch
    in_backward: float  # of all collectives in a backward pass
    gradients: float  # to sum the gradients, after all microbatches
    # Of all blocks:
    update: float  # of the optimizer
    busy: float  # of all collectives of parameters and gradients in a step, in turn
    at_last: float  # of the collectives that start after the last backward pass has begun
    # Of the collectives that a rank with all blocks starts in a pass, without those of two blocks: the rest is awaited.
    of_forward: float
    of_backward: float
    under_way: float  # of two collectives, which a backward pass of a stage may leave unfinished

    def with_passes(
        self,
        candidate: Candidate,
        num_blocks: int,
        passes: float,
        last_backward: float | None = None,
        *,
        gathers_first: bool = True,
    ) -> float:
        """A lower bound of the candidate's seconds, given `passes`: seconds of all forward and backward passes.

        last_backward: seconds of the work in the last backward pass on a rank with all blocks; None: of all passes.
        gathers_first: False if `passes` has seconds of the host, which may issue ops while parameters are gathered.
        A pipeline's stage gathers parameters before the passes, and sums gradients after the passes. A rank with all
        blocks gathers before the passes, too, except under zero=3, and may hide all other collectives in the passes.
        """
        gathers = self.gathers if gathers_first else 0.0
        if candidate.pp > 1:
            of_blocks = (gathers + self.gradients) * (num_blocks // candidate.pp)
            # Of the rank with the most blocks, whose sums of all microbatches are in turn.
            sums = candidate.microbatches * self.in_backward * -(-num_blocks // candidate.pp)
            return max(passes, sums) + of_blocks + self.update / candidate.pp
        before = 0.0 if candidate.zero == 3 else gathers * num_blocks
        before += passes
        last = passes if last_backward is None else max(last_backward, self.of_backward)
        return max(self.busy, before, before - last + self.at_last) + self.update


WITHOUT_DATA = DataWork(**dict.fromkeys((each.name for each in fields(DataWork)), 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Seconds of a microbatch on a stage with all blocks, without collectives over the data axes. Made by `work_of`."""

    # Running sums: before the first block, up to the end of block 0, of block 1, ..., and with the part after the last.
    first: tuple[Seconds, ...]  # of the first microbatch, whose gradients are new
    later: tuple[Seconds, ...]  # of a later microbatch, which adds to the gradients

    def seconds(
        self, candidate: Candidate, share: float = 1.0, *, message: float = 0.0, data: DataWork = WITHOUT_DATA
    ) -> float:
        """A lower bound of the candidate's step, if each microbatch has `share` of the device's work.

        The host's work is not divided. message: seconds of a message between stages. data: of the data axes, whose
        collectives under zero=2 and zero=3 make a pass longer.
        """
        if candidate.pp == 1:
            first, later, more = self.first[-1], self.later[-1], candidate.microbatches - 1
            device = sum(
                count * max(share * each.forward, data.of_forward)
                + count * max(share * each.backward, data.of_backward)
                for count, each in ((1, first), (more, later))
            )
            host = first.host_forward + first.host_backward + more * (later.host_forward + later.host_backward)
            return max(device, host)
        layers = layers_of_stages(len(self.later) - 2, candidate.pp * candidate.chunks)

        def of_stages(sums_of: Sequence[Seconds]) -> list[Seconds]:
            bounds = [Seconds(), *(sums_of[cut] for cut in accumulate(layers[:-1])), sums_of[-1]]
            return [after.minus(before) for before, after in pairwise(bounds)]

        def backward(sums_of: Sequence[Seconds]) -> list[float]:
            return [
                max(share * each.backward, each.host_backward, data.in_backward * blocks - data.under_way)
                for each, blocks in zip(of_stages(sums_of), layers, strict=True)
            ]

        return pipeline_floor(
            [max(share * each.forward, each.host_forward) for each in of_stages(self.later)],
            backward(self.later),
            first_backward=backward(self.first),
            ranks=candidate.pp,
            microbatches=candidate.microbatches,
            schedule=candidate.schedule,
            message=message,
        )


def work_of(
    trace: Trace, work: Callable[[Compute], float], transfer: Callable[[Start], float], host: float = 0.0
) -> StageWork:
    """The seconds of a trace's first two microbatches. The last of three microbatches takes no less than the second.

    work, transfer: seconds of an event: the price, or a lower bound of the price. host: seconds of the host for an op.
    """
    first, later = (_sums(trace, min(each, len(trace.times) - 1), work, transfer, host) for each in (0, 1))
    return StageWork(first=first, later=later)


def _sums(
    trace: Trace, microbatch: int, work: Callable[[Compute], float], transfer: Callable[[Start], float], host: float
) -> tuple[Seconds, ...]:
    """`StageWork.first` or `later`, of a microbatch of the trace."""
    totals = {"before": Seconds(), "after": Seconds()}
    blocks = [Seconds()] * trace.num_blocks
    for phase in PHASES:
        for segment in trace.select(phase=phase, microbatch=microbatch):
            launches = sum(event.num_launches for event in segment.events if isinstance(event, Compute))
            device = _seconds_in_order(segment.events, work, transfer)
            is_forward = phase == "forward"
            found = Seconds(device, 0.0, launches * host) if is_forward else Seconds(0.0, device, 0.0, launches * host)
            if not segment.blocks:
                totals[segment.place] = totals[segment.place].plus(found)
            for block in segment.blocks:
                blocks[block] = blocks[block].plus(found)
    return tuple(accumulate([totals["before"], *blocks, totals["after"]], Seconds.plus))


def _seconds_in_order(
    events: Sequence[Event], work: Callable[[Compute], float], transfer: Callable[[Start], float]
) -> float:
    """The device's seconds for a segment: work in order, collectives beside the work, waits for collectives.

    Collectives of parameters and gradients are left out. Without a wait in the segment, a collective takes no time.
    work, transfer: seconds of an event.
    """
    now, free, ends = 0.0, dict[str, float](), dict[int, float]()
    for event in events:
        match event:
            case Compute():
                now += work(event)
            case Start(purpose=""):
                free[event.group] = ends[event.number] = max(now, free.get(event.group, 0.0)) + transfer(event)
            case Wait():
                now = max(now, ends.get(event.number, 0.0))
    return now


def data_work_of(
    trace: Trace, work: Callable[[Compute], float], transfer: Callable[[Start], float], *, gathers_always: bool
) -> DataWork:
    """The seconds of a trace's collectives of parameters and gradients, and of the update.

    work, transfer: seconds of an event: the price, or a lower bound of the price. gathers_always: whether each pass
    gathers the parameters, and not the step's first alone.
    Collectives of different groups may run side by side: the group with the most seconds counts.
    """
    sums: dict[tuple[str, ...], list[float]] = {}  # by axes of a group: busy, at last
    longest = 0.0  # of a block's collectives in a backward pass
    of_blocks: dict[tuple[str, ...], dict[str, list[float]]] = {}
    update = 0.0
    for segment in trace.segments:
        copies = trace.count(segment)
        is_first, is_last = segment.microbatch == 0, segment.microbatch == len(trace.times) - 1
        if segment.phase == "optimizer":
            update += copies * sum(work(each) for each in segment.events if isinstance(each, Compute))
        for start in segment.events:
            if not isinstance(start, Start) or not start.purpose:
                continue
            seconds = transfer(start)
            found = sums.setdefault(start.axes, [0.0, 0.0])
            found[0] += copies * seconds
            if segment.phase == "gradients" or (segment.phase == "backward" and is_last):
                found[1] += copies * seconds
            if segment.phase == "backward" and segment.blocks:
                longest = max(longest, seconds)
            if segment.phase == "gradients" or (segment.phase in PHASES and is_first):
                blocks = of_blocks.setdefault(start.axes, {})
                totals = blocks.setdefault(segment.phase, [0.0] * trace.num_blocks)
                for block in segment.blocks:
                    totals[block] += seconds

    def least(phase: Phase) -> float:
        return max((min(each[phase], default=0.0) for each in of_blocks.values() if phase in each), default=0.0)

    def awaited(phase: Phase) -> float:
        totals = (each[phase] for each in of_blocks.values() if phase in each)
        return max((sum(each) - 2 * max(each, default=0.0) for each in totals), default=0.0)

    return DataWork(
        gathers=least("forward"),
        in_backward=least("backward"),
        gradients=least("gradients"),
        update=update,
        busy=max((busy for busy, _ in sums.values()), default=0.0),
        at_last=max((at_last for _, at_last in sums.values()), default=0.0),
        of_forward=max(0.0, awaited("forward")) if gathers_always else 0.0,
        of_backward=max(0.0, awaited("backward")),
        under_way=2 * longest,
    )


def received_share(kind: str, ranks: int) -> float:
    """The bytes that a rank receives in a collective of `ranks` ranks, divided by the bytes of the whole tensor.

    For an all-to-all the whole is all ranks' parts together, equal in size.
    """
    match kind:
        case "all-reduce":
            return 2 * (ranks - 1) / ranks
        case "all-to-all":
            return (ranks - 1) / ranks**2
    return (ranks - 1) / ranks


def floor_seconds(compute: Compute, chip: Chip) -> float:
    """A lower bound of the price of work, in proportion to operations and bytes: the time at the chip's best rates.

    So half the work, of whatever shape, takes at least half these seconds.
    """
    rate = chip.rate(compute.name, compute.part, compute.dtype)
    moved = compute.nbytes / chip.reachable_bandwidth
    if rate is not None:
        return rate.seconds_per_byte * compute.nbytes + rate.seconds_per_flop * compute.flops
    if compute.kind == "product":
        return compute.flops / _best_speed(compute.dtype, chip)
    if compute.kind == "attention":
        share = chip.attention_reachable["backward" if compute.part == "backward" else "forward"]
        return max(moved, compute.flops / (chip.peak(compute.dtype) * share))
    return moved


def _best_speed(dtype: str, chip: Chip) -> float:
    """An upper bound of the FLOP/s of any product's price: of the fastest measured product, or the sustained peak."""
    measured = [each.flops / each.seconds for each in chip.products if each.dtype == dtype]
    return max(measured) if measured else chip.sustained_peak(dtype)
