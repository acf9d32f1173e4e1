"""`time_pipeline`: the timeline of a pipeline's step. Prices a schedule's actions from the trace of a single stage."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

from ..schedules.schedule import ActionKind, Schedule
from ..step.communication import Phase
from .bounds import layers_of_stages
from .chip import Chip
from .events import Compute, Event, Segment, Start, Trace, Wait
from .pipeline_flow import ActionFlow, Position, flow_of
from .price import collective_seconds, product_bytes
from .program import Loop, Pieces, PricedSegment
from .timeline import PARTS, Clocks, Span, Timeline, TimePart

Parts = tuple[float, ...]  # seconds by part, in the order of `timeline.PARTS`
StageBlocks = tuple[tuple[int, int], ...]  # the blocks of each stage, [start, stop), in the order of data


def even_stages(num_blocks: int, num_stages: int) -> StageBlocks:
    """Cut blocks into stages as evenly as possible, longer stages first, as `PipelinePlan.split` of "layers" does.

    Raises ValueError for more stages than blocks.
    """
    if not 1 <= num_stages <= num_blocks:
        raise ValueError(
            f"{num_blocks} blocks cannot be cut into {num_stages} stages; each stage needs a block or more"
        )
    return tuple(pairwise(accumulate(layers_of_stages(num_blocks, num_stages), initial=0)))


def time_pipeline(
    trace: Trace,
    chip: Chip,
    schedule: Schedule,
    *,
    stages: StageBlocks | None = None,
    stride: int = 1,
    compiled: bool = False,
    world: int | None = None,
    keep_spans: bool = False,
) -> Timeline:
    """The timeline of a pipeline's step.

    `Timeline.parts` are of the rank whose gradients are ready last, with the update of the slowest rank.
    trace: from `trace_step`, of one stage that holds all blocks of the model. A stage runs the segments of the stage's
        blocks. The first stage also runs the segments before the blocks, the last stage the segments after the blocks.
        The first and the last microbatch of the trace are the schedule's first and last; the second stands for all
        between.
    stages: the blocks of each stage; None: `even_stages`.
    stride: the distance in ranks of neighbours along "pp".
    compiled, world: as for `time_step`. keep_spans: whether to fill `Timeline.spans`.
    First, all ranks at once gather the parameters of their stages. Then each action takes the time which the action
    would take if the stage ran alone, and a message of `trace.message_bytes` delays the receiver. A schedule may split
    each backward into I, the gradients of inputs, and W, the gradients of weights: the products of weight gradients are
    then in W. Gradients are summed over the data axes after a rank's last action, because `Pipeline.find_gradients`
    pauses their sync. The norm of the gradients needs all ranks, so all updates begin when the last rank's gradients
    are ready. The step ends with the slowest update.
    Raises ValueError for stages unfit for the schedule or the trace.
    """
    stages = even_stages(trace.num_blocks, schedule.num_stages) if stages is None else stages
    if len(stages) != schedule.num_stages or stages[0][0] != 0 or stages[-1][1] != trace.num_blocks:
        raise ValueError(
            f"stages are {stages}; schedule {schedule.name!r} has {schedule.num_stages}, and the model's "
            f"{trace.num_blocks} blocks must all be in one"
        )
    prices = _Prices(trace, chip, stages, compiled=compiled, world=world)
    flow = flow_of(schedule)
    durations = [
        prices.of_action(kind, stage, _traced_microbatch(position, trace.times))
        for kind, stage, position in flow.durations
    ]
    seconds = [math.fsum(each) for each in durations]
    sent = Start(number=0, kind="recv", axes=("pp",), group="", size=2, stride=stride, nbytes=trace.message_bytes)
    message = collective_seconds(sent, chip, world=world)
    gathers = [prices.of_gathers(own) for own in schedule.stages]
    begins = [math.fsum(parts) for parts in gathers]
    ends = flow.ends(seconds, message, begins)
    gradients = [prices.of_rank(own, "gradients") for own in schedule.stages]
    updates = [prices.of_rank(own, "optimizer") for own in schedule.stages]
    done = flow.last_ends(ends)
    ready = [end + math.fsum(parts) for end, parts in zip(done, gradients, strict=True)]
    last = max(range(schedule.ranks), key=ready.__getitem__)
    slowest = max(range(schedule.ranks), key=lambda rank: math.fsum(updates[rank]))
    busy = _add(gathers[last], *(durations[each.duration] for each in flow.steps if each.rank == last))
    idle = max(0.0, done[last] - math.fsum(busy))
    # The bubble is the rank's idle time if messages took no time.
    free = flow.last_ends(flow.ends(seconds, 0.0, begins))[last] if message else done[last]
    bubble = min(idle, max(0.0, free - math.fsum(busy)))
    parts = _add(
        busy, gradients[last], updates[slowest], _only("bubble", bubble), _only("communication", idle - bubble)
    )
    spans = tuple(_spans(flow, ends, seconds, gathers, gradients, updates, ready)) if keep_spans else ()
    return Timeline(seconds=math.fsum(parts), parts=dict(zip(PARTS, parts, strict=True)), spans=spans)


def _traced_microbatch(position: Position, times: Sequence[int]) -> int:
    """The number of the trace's microbatch that stands for a schedule's microbatch at `position`."""
    return {"first": 0, "between": min(1, len(times) - 1), "last": len(times) - 1}[position]


def _add(*parts: Parts) -> Parts:
    return tuple(math.fsum(each) for each in zip(*parts, strict=True))


def _only(part: TimePart, seconds: float) -> Parts:
    return tuple(seconds if each == part else 0.0 for each in PARTS)


class _Prices:
    """Prices actions and phases of stages, in `Parts`. Equal work is priced once."""

    def __init__(self, trace: Trace, chip: Chip, stages: StageBlocks, *, compiled: bool, world: int | None) -> None:
        self._trace, self._chip, self._stages, self._compiled = trace, chip, stages, compiled
        self._pieces = Pieces(trace.segments, trace.times, chip, compiled=compiled, world=world)
        self._tokens = {
            size[1]
            for segment in trace.select(phase="forward")
            for event in segment.events
            if isinstance(event, Compute) and event.kind == "product"
            for size in event.sizes
        }
        self._of_action: dict[tuple[ActionKind, int, int], Parts] = {}
        self._of_work: dict[tuple[ActionKind, bool, tuple[tuple[tuple[int, ...], int], ...]], Parts] = {}
        self._halves: dict[tuple[int, ActionKind], PricedSegment] = {}

    def of_action(self, kind: ActionKind, stage: int, microbatch: int) -> Parts:
        """Seconds of an action. microbatch: of the trace."""
        key = kind, stage, microbatch
        if key not in self._of_action:
            phase: Phase = "forward" if kind == "F" else "backward"
            self._of_action[key] = self._time((stage,), phase, microbatch, kind)
        return self._of_action[key]

    def of_rank(self, stages: Sequence[int], phase: Phase) -> Parts:
        """Seconds of "gradients" or "optimizer" on a rank with `stages`."""
        return self._time(stages, phase, -1, "F")

    def of_gathers(self, stages: Sequence[int]) -> Parts:
        """Seconds to gather the parameters of a rank's `stages`, before all actions."""
        return self._time(stages, "forward", 0, "F", gathers=True)

    def _time(
        self, stages: Sequence[int], phase: Phase, microbatch: int, kind: ActionKind, *, gathers: bool = False
    ) -> Parts:
        is_last = microbatch < 0 or gathers
        key = kind, is_last, tuple(self._runs(stages, phase, microbatch, gathers=gathers))
        if key not in self._of_work:
            clocks = Clocks(self._chip, compiled=self._compiled)
            for indices, copies in key[2]:
                clocks.run(Loop(tuple(self._piece(index, kind) for index in indices), copies))
            if is_last:
                clocks.finish()
            self._of_work[key] = tuple(clocks.timeline().parts.values())
        return self._of_work[key]

    def _runs(
        self, stages: Sequence[int], phase: Phase, microbatch: int, *, gathers: bool
    ) -> Iterator[tuple[tuple[int, ...], int]]:
        """The work of stages in a phase, in order: (indices of the trace's segments, repetitions in a row).

        gathers: take only the segments with nothing but gathers of parameters; False: take all other segments.
        """
        own = [block for stage in stages for block in range(*self._stages[stage])]
        places: dict[str, list[int]] = {"before": [], "after": []}
        of_block: dict[int, list[int]] = {block: [] for block in own}
        for index, segment in enumerate(self._trace.segments):
            if segment.phase == phase and segment.microbatch == microbatch and _is_gather(segment) == gathers:
                if segment.place == "block":
                    for block in segment.blocks:
                        if block in of_block:
                            of_block[block].append(index)
                else:
                    places[segment.place].append(index)
        before = tuple(places["before"]) if 0 in stages else ()
        after = tuple(places["after"]) if len(self._stages) - 1 in stages else ()
        if phase in ("backward", "gradients"):
            before, after, own = after, before, own[::-1]
        if before:
            yield before, 1
        for indices, group in groupby(tuple(of_block[block]) for block in own):
            if indices:
                yield indices, len(list(group))
        if after:
            yield after, 1

    def _piece(self, index: int, kind: ActionKind) -> PricedSegment:
        """The priced operations of a segment; for the kinds I and W, of that half of a backward."""
        key = index, kind
        if key not in self._halves:
            segment = self._trace.segments[index]
            if kind in ("I", "W"):
                events = (split_weight_gradients(each, self._tokens)[kind == "W"] for each in segment.events)
                segment = replace(segment, events=tuple(each for each in events if each is not None))
            self._halves[key] = self._pieces.of(segment)
        return self._halves[key]


def _is_gather(segment: Segment) -> bool:
    """Whether a segment has nothing but gathers of parameters, which serve all microbatches."""
    if segment.phase != "forward" or segment.microbatch != 0:
        return False
    return all(
        isinstance(event, Wait)
        or (isinstance(event, Start) and event.purpose == "parameters")
        or (isinstance(event, Compute) and event.name.startswith("aten._foreach_copy"))
        for event in segment.events
    )


def split_weight_gradients(event: Event, tokens: Collection[int]) -> tuple[Event | None, Event | None]:
    """Split a backward's event into the work of the actions I and W. W has the products of weight gradients.

    tokens: sizes M of the forward's products, [M, K] @ [K, N]. The product of a weight gradient sums over tokens: K is
        in `tokens`, M is not. With as many tokens as features, both are; then the second half of an op's products
        counts as weight gradients, because ops compute these last.
    """
    if not isinstance(event, Compute) or event.kind != "product" or event.part != "backward":
        return event, None
    count = len(event.sizes)
    is_weight = [K in tokens and (M not in tokens or 2 * i >= count > 1) for i, (_, M, _, K) in enumerate(event.sizes)]
    weights = tuple(size for size, of_weight in zip(event.sizes, is_weight, strict=True) if of_weight)
    if not weights:
        return event, None
    if len(weights) == count:
        return None, event
    inputs = tuple(size for size, of_weight in zip(event.sizes, is_weight, strict=True) if not of_weight)
    nbytes = min(event.nbytes, sum(product_bytes(size, event.dtype) for size in weights))
    flops = sum(2 * math.prod(size) for size in weights)
    return (
        replace(
            event,
            sizes=inputs,
            nbytes=event.nbytes - nbytes,
            flops=event.flops - flops,
            num_launches=max(1, event.num_launches - len(weights)),
        ),
        replace(event, sizes=weights, nbytes=nbytes, flops=flops, num_launches=len(weights)),
    )


def _spans(
    flow: ActionFlow,
    ends: Sequence[float],
    seconds: Sequence[float],
    gathers: Sequence[Parts],
    gradients: Sequence[Parts],
    updates: Sequence[Parts],
    ready: Sequence[float],
) -> Iterator[Span]:
    """The gather of parameters, the actions, the sum of gradients and the update of each rank."""
    for rank, parts in enumerate(gathers):
        if spent := math.fsum(parts):
            yield Span(f"pp={rank}", "parameters", "", "", "communication", 0.0, spent)
    for step, end in zip(flow.steps, ends, strict=True):
        kind, stage, microbatch = step.action
        begin = end - seconds[step.duration]
        yield Span(f"pp={step.rank}", f"{kind}{microbatch}", f"stage {stage}", "", "products", begin, end)
    for rank, parts in enumerate(gradients):
        if spent := math.fsum(parts):
            yield Span(f"pp={rank}", "gradients", "", "", "communication", ready[rank] - spent, ready[rank])
    for rank, parts in enumerate(updates):
        if spent := math.fsum(parts):
            yield Span(f"pp={rank}", "optimizer", "", "", "optimizer", max(ready), max(ready) + spent)
