"""Lower bounds of a plan's seconds and bytes: never above the plan's price, and found without tracing the plan.

By these bounds a search proves that unpriced plans are no faster than the results. The bounds hold because the work of
a step is conserved: at best, the ranks divide the work evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add, sub
from typing import NamedTuple

from ..schedules.schedule import ScheduleName
from ..step.communication import Phase
from .chip import Chip
from .data_work import PASSES, WITHOUT_DATA, DataWork
from .events import Compute, Event, Place, Start, Trace, Wait
from .plans import Candidate
from .schedule_bounds import bounds_of


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
    message between stages. schedule: None means any schedule that does not split the backward.
    first_backward: seconds of the first microbatch's backward, whose gradients are new; later microbatches add to these
    gradients. None: as `backward`.
    A rank begins after the first microbatch has passed all earlier stages, and computes all microbatches. After the
    rank's last backward, that microbatch passes the earlier stages on the way back. Where the schedule splits the
    backward, the way back is not counted, because gradients of weights may be computed meanwhile.
    Raises ValueError for a schedule without a row in `SCHEDULE_BOUNDS`.
    """
    splits = schedule is not None and bounds_of(schedule).splits_backward
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


class Leads(NamedTuple):
    """Seconds for which the device waits for the host at the beginning of a pipeline's action, at least."""

    before: float = 0.0  # of a forward that begins before the first block
    forward: float = 0.0  # of a forward that begins with a block
    after: float = 0.0  # of a backward that begins after the last block
    backward: float = 0.0  # of a backward that begins with a block


NO_LEADS = Leads()


class StageSeconds(NamedTuple):
    """Lower bounds of the seconds of a microbatch's passes, for each stage of a pipeline."""

    first_forward: list[float]  # of the first microbatch
    first_backward: list[float]
    forward: list[float]  # of a later microbatch
    backward: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Seconds of a microbatch on a stage with all blocks, without collectives over the data axes. Made by `work_of`."""

    # Running sums: before the first block, up to the end of block 0, of block 1, ..., and with the part after the last.
    first: tuple[Seconds, ...]  # of the first microbatch, whose gradients are new
    later: tuple[Seconds, ...]  # of a later microbatch, which adds to the gradients
    first_leads: Leads = NO_LEADS
    later_leads: Leads = NO_LEADS

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
        stages = self.of_stages(candidate, share, data)
        return pipeline_floor(
            stages.forward,
            stages.backward,
            first_backward=stages.first_backward,
            ranks=candidate.pp,
            microbatches=candidate.microbatches,
            schedule=candidate.schedule,
            message=message,
        )

    def of_stages(self, candidate: Candidate, share: float = 1.0, data: DataWork = WITHOUT_DATA) -> StageSeconds:
        """The seconds of the candidate's stages. Arguments: as for `seconds`."""
        layers = layers_of_stages(len(self.later) - 2, candidate.pp * candidate.chunks)

        def seconds(sums_of: Sequence[Seconds], leads: Leads) -> list[list[float]]:
            bounds = [Seconds(), *(sums_of[cut] for cut in accumulate(layers[:-1])), sums_of[-1]]
            stages = [after.minus(before) for before, after in pairwise(bounds)]
            inner = len(stages) - 1
            forward_leads = [leads.before, *[leads.forward] * inner]
            backward_leads = [*[leads.backward] * inner, leads.after]
            return [
                [
                    max(share * each.forward + lead, each.host_forward)
                    for each, lead in zip(stages, forward_leads, strict=True)
                ],
                [
                    max(share * each.backward + lead, each.host_backward, data.in_backward * blocks - data.under_way)
                    for each, lead, blocks in zip(stages, backward_leads, layers, strict=True)
                ],
            ]

        return StageSeconds(*seconds(self.first, self.first_leads), *seconds(self.later, self.later_leads))


def work_of(
    trace: Trace, work: Callable[[Compute], float], transfer: Callable[[Start], float], host: float = 0.0
) -> StageWork:
    """The seconds of a trace's first two microbatches. The last of three microbatches takes no less than the second.

    work, transfer: seconds of an event: the price, or a lower bound of the price. host: seconds of the host for an op.
    """
    microbatches = [min(each, len(trace.times) - 1) for each in (0, 1)]
    first, later = (_sums(trace, each, work, transfer, host) for each in microbatches)
    first_leads, later_leads = (_leads(trace, each, work, transfer, host) for each in microbatches)
    return StageWork(first=first, later=later, first_leads=first_leads, later_leads=later_leads)


def _leads(
    trace: Trace, microbatch: int, work: Callable[[Compute], float], transfer: Callable[[Start], float], host: float
) -> Leads:
    """The leads of a microbatch's actions, each from the first segment of the action."""
    if not host:
        return NO_LEADS

    def leads(phase: Phase, outer: Place) -> tuple[float, float]:
        of_parts: dict[Place | int, float] = {}
        for segment in trace.select(phase=phase, microbatch=microbatch):
            waits = _seconds_in_order(segment.events, work, transfer, host)
            lead = waits - _seconds_in_order(segment.events, work, transfer)
            for part in segment.blocks or (segment.place,):
                of_parts.setdefault(part, lead)
        of_block = min((of_parts.get(block, 0.0) for block in range(trace.num_blocks)), default=0.0)
        return of_parts.get(outer, of_block), of_block

    return Leads(*leads("forward", "before"), *leads("backward", "after"))


def _sums(
    trace: Trace, microbatch: int, work: Callable[[Compute], float], transfer: Callable[[Start], float], host: float
) -> tuple[Seconds, ...]:
    """`StageWork.first` or `later`, of a microbatch of the trace."""
    totals = {"before": Seconds(), "after": Seconds()}
    blocks = [Seconds()] * trace.num_blocks
    for phase in PASSES:
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
    events: Sequence[Event], work: Callable[[Compute], float], transfer: Callable[[Start], float], host: float = 0.0
) -> float:
    """The device's seconds for a segment: work in order, collectives beside the work, waits for collectives.

    host: seconds in which the host issues an op, from the beginning of the segment on; 0: ops are issued ahead.
    Collectives of parameters and gradients are left out. Without a wait in the segment, a collective takes no time.
    work, transfer: seconds of an event.
    """
    now, issued, free, ends = 0.0, 0.0, dict[str, float](), dict[int, float]()
    for event in events:
        match event:
            case Compute():
                issued += event.num_launches * host
                now = max(now, issued) + work(event)
            case Start(purpose=""):
                free[event.group] = ends[event.number] = max(now, free.get(event.group, 0.0)) + transfer(event)
            case Wait():
                now = max(now, ends.get(event.number, 0.0))
    return now


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
