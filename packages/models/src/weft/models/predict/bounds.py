"""Lower bounds of a plan's seconds and bytes: never above the price, and found without tracing the plan.

Search proves by them that plans it does not price are no faster than those it found. All work of a step is conserved:
ranks at best divide it evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add, sub
from typing import NamedTuple

from ..schedules.schedule import Name
from .chip import Chip
from .events import Compute, Event, Phase, Start, Trace, Wait
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
    schedule: Name | None,
    message: float = 0.0,
) -> float:
    """A time below which no order of the actions of a pipeline ends.

    forward, backward: seconds of a microbatch on each stage; stage s is on rank s % ranks. message: seconds of a
    message between stages.
    A rank begins when the first microbatch has passed the stages before its own. It computes all its microbatches.
    After its last backward, that microbatch passes the same stages back. Under zero_bubble, gradients of weights may
    come after that, so the way back is not counted.
    """
    splits = schedule == "zero_bubble"
    floor, way_in, way_back = 0.0, 0.0, 0.0
    for rank in range(ranks):
        busy = microbatches * sum(forward[stage] + backward[stage] for stage in range(rank, len(forward), ranks))
        floor = max(floor, way_in + busy + (0.0 if splits else way_back))
        way_in += forward[rank] + message
        way_back += backward[rank] + message
    passed = sum(forward) + (len(forward) - 1) * message  # a microbatch passes all stages
    return max(floor, passed + (0.0 if splits else sum(backward) + (len(forward) - 1) * message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Bytes of a model's parameters, in all and in parts; what a rank must hold follows from them."""

    total: int
    in_blocks: tuple[int, ...]  # of each block
    trained: int  # of those with gradients
    experts: int = 0  # of those on an axis "ep"
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
    """Bytes below which no rank with the most parameters stays: parameters, gradients and optimizer states.

    data: dp x cp. Counts every parameter as divided over "tp", and the stage with the most blocks, or the mean.
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
    """Seconds of forward and backward: of the device with its waits for collectives, and of the host."""

    forward: float = 0.0
    backward: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(*map(add, self, other))

    def minus(self, other: Seconds) -> Seconds:
        return Seconds(*map(sub, self, other))


@dataclass(frozen=True, slots=True)
class StageWork:
    """Seconds of a microbatch on a stage with all blocks, without collectives over the data axes.

    Made from a trace by `work_of`, with prices or with floors of them.
    """

    # Sums: of what comes before the blocks, of that and the first block, ..., and of all that comes before the end.
    sums: tuple[Seconds, ...]

    def seconds(self, candidate: Candidate, share: float = 1.0, message: float = 0.0) -> float:
        """A time below which no step by the candidate ends, if a microbatch has `share` of the device's work.

        The host issues as many ops for any share. message: seconds of a message between stages.
        """
        whole = self.sums[-1]
        if candidate.pp == 1:
            device, host = whole.forward + whole.backward, whole.host_forward + whole.host_backward
            return candidate.microbatches * max(share * device, host)
        stages, num_blocks = candidate.pp * candidate.chunks, len(self.sums) - 2
        cuts = [0, *accumulate(layers_of_stages(num_blocks, stages))]
        bounds = [Seconds(), *(self.sums[cut] for cut in cuts[1:-1]), whole]
        own = [after.minus(before) for before, after in pairwise(bounds)]
        return pipeline_floor(
            [max(share * each.forward, each.host_forward) for each in own],
            [max(share * each.backward, each.host_backward) for each in own],
            ranks=candidate.pp,
            microbatches=candidate.microbatches,
            schedule=candidate.schedule,
            message=message,
        )


def work_of(
    trace: Trace, work: Callable[[Compute], float], transfer: Callable[[Start], float], host: float = 0.0
) -> StageWork:
    """The seconds of the last microbatch of a trace, with each event's seconds by the two functions.

    host: seconds of the host for an op.
    """
    microbatch = len(trace.times) - 1
    totals = {"before": Seconds(), "after": Seconds()}
    blocks = [Seconds()] * trace.num_blocks
    for phase in PHASES:
        for segment in trace.select(phase=phase, microbatch=microbatch):
            launches = sum(event.num_launches for event in segment.events if isinstance(event, Compute))
            device = seconds_in_order(segment.events, work, transfer)
            is_forward = phase == "forward"
            found = Seconds(device, 0.0, launches * host) if is_forward else Seconds(0.0, device, 0.0, launches * host)
            if not segment.blocks:
                totals[segment.place] = totals[segment.place].plus(found)
            for block in segment.blocks:
                blocks[block] = blocks[block].plus(found)
    return StageWork(tuple(accumulate([totals["before"], *blocks, totals["after"]], Seconds.plus)))


def seconds_in_order(
    events: Sequence[Event], work: Callable[[Compute], float], transfer: Callable[[Start], float]
) -> float:
    """The device's seconds for events of a segment: work one after the other, collectives beside it, waits.

    Collectives of parameters and gradients are left out, and those which the segment does not wait for.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWork:
    """Seconds of a rank with all blocks, over the data axes and in the update. Made by `data_work_of`."""

    gradients: float  # of the sum of a block's gradients, after all microbatches; the least of all blocks
    update: float  # of the optimizer, for all blocks
    busy: float  # of all collectives of parameters and gradients in a step, one after the other

    def after_backward(self, candidate: Candidate, num_blocks: int) -> float:
        """Seconds that no step by the candidate can hide behind its forward and backward passes."""
        if candidate.pp == 1:
            return self.update
        return self.gradients * (num_blocks // candidate.pp) + self.update / candidate.pp


def data_work_of(trace: Trace, work: Callable[[Compute], float], transfer: Callable[[Start], float]) -> DataWork:
    """The seconds of a trace's collectives of parameters and gradients, and of its update, by the two functions."""
    blocks, busy, update = [0.0] * trace.num_blocks, 0.0, 0.0
    for segment in trace.segments:
        copies = max(1, len(segment.blocks)) * (trace.times[segment.microbatch] if segment.microbatch >= 0 else 1)
        seconds = sum(transfer(each) for each in segment.events if isinstance(each, Start) and each.purpose)
        busy += copies * seconds
        if segment.phase == "gradients":
            for block in segment.blocks:
                blocks[block] += seconds
        if segment.phase == "optimizer":
            update += copies * sum(work(each) for each in segment.events if isinstance(each, Compute))
    return DataWork(gradients=min(blocks, default=0.0), update=update, busy=busy)


def received_share(kind: str, ranks: int) -> float:
    """Bytes that a rank of a group receives in a collective, over those of the whole tensor on one rank.

    Of an all-to-all the whole is the tensor of all ranks together, of which each rank has an equal part.
    """
    match kind:
        case "all-reduce":
            return 2 * (ranks - 1) / ranks
        case "all-to-all":
            return (ranks - 1) / ranks**2
    return (ranks - 1) / ranks


def floor_seconds(compute: Compute, chip: Chip) -> float:
    """Seconds of work in proportion to its operations and bytes, at the chip's best: a share of the work takes at
    least this share of the seconds, whatever its shape.
    """
    rate = chip.rate(compute.name, compute.part, compute.dtype)
    moved = compute.nbytes / chip.reachable_bandwidth
    if rate is not None:
        return rate.seconds_per_byte * compute.nbytes + rate.seconds_per_flop * compute.flops
    if compute.kind == "product":
        return compute.flops / best_speed(compute.dtype, chip)
    if compute.kind == "attention":
        share = chip.attention_reachable["backward" if compute.part == "backward" else "forward"]
        return max(moved, compute.flops / (chip.peak(compute.dtype) * share))
    return moved


def best_speed(dtype: str, chip: Chip) -> float:
    """FLOP/s above which no product is priced: of the fastest measured product, or the reachable peak."""
    measured = [each.flops / each.seconds for each in chip.products if each.dtype == dtype]
    return max(measured) if measured else chip.reachable_peak(dtype)
