"""`DataWork`: seconds of the data axes' collectives and of the update, for lower bounds of a plan's seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..step.communication import Phase
from .events import Compute, Place, Start, Trace
from .plans import Candidate

PASSES: tuple[Phase, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWork:
    """Seconds of the data axes' collectives and of the update, on a rank with all blocks. Made by `DataFloors`."""

    # Of the block with the least seconds:
    gathers: float  # to gather the parameters, in the forward pass of the first microbatch
    in_backward: float  # of all collectives in a backward pass
    gradients: float  # to sum the gradients, after all microbatches
    # Of the parts before the first block and after the last, beside a block's in `gathers` and `gradients`:
    outer_gathers: tuple[float, float] = (0.0, 0.0)
    outer_gradients: tuple[float, float] = (0.0, 0.0)
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
        blocks may hide all collectives in the passes.
        """
        if candidate.pp > 1:
            gathers = self.gathers if gathers_first else 0.0
            of_blocks = (gathers + self.gradients) * (num_blocks // candidate.pp)
            # Of the rank with the most blocks, whose sums of all microbatches are in turn.
            sums = candidate.microbatches * self.in_backward * -(-num_blocks // candidate.pp)
            return max(passes, sums) + of_blocks + self.update / candidate.pp
        last = passes if last_backward is None else max(last_backward, self.of_backward)
        return max(self.busy, passes, passes - last + self.at_last) + self.update


WITHOUT_DATA = DataWork(
    gathers=0.0, in_backward=0.0, gradients=0.0, update=0.0, busy=0.0, at_last=0.0, of_forward=0.0, of_backward=0.0,
    under_way=0.0,
)  # fmt: skip


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
    of_parts: dict[Phase, dict[tuple[str, ...], dict[Place | int, float]]] = {}  # by phase and axes: a part's seconds
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
            if segment.phase == "gradients" or (segment.phase in PASSES and is_first):
                parts = of_parts.setdefault(segment.phase, {}).setdefault(start.axes, {})
                for part in segment.blocks or (segment.place,):
                    parts[part] = parts.get(part, 0.0) + seconds

    def blocks(parts: Mapping[Place | int, float]) -> list[float]:
        return [parts.get(block, 0.0) for block in range(trace.num_blocks)]

    def least(phase: Phase) -> tuple[float, tuple[float, float]]:
        """Of the group with the slowest least block: the seconds of the block, and of the parts outside blocks."""
        groups = of_parts.get(phase, {}).values()
        return max(
            ((min(blocks(each), default=0.0), (each.get("before", 0.0), each.get("after", 0.0))) for each in groups),
            default=(0.0, (0.0, 0.0)),
        )

    def awaited(phase: Phase) -> float:
        totals = map(blocks, of_parts.get(phase, {}).values())
        return max((sum(each) - 2 * max(each, default=0.0) for each in totals), default=0.0)

    gathers, outer_gathers = least("forward")
    gradients, outer_gradients = least("gradients")

    return DataWork(
        gathers=gathers,
        in_backward=least("backward")[0],
        gradients=gradients,
        outer_gathers=outer_gathers,
        outer_gradients=outer_gradients,
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
    Raises ValueError for a kind whose share is not known.
    """
    match kind:
        case "all-reduce":
            return 2 * (ranks - 1) / ranks
        case "all-to-all":
            return (ranks - 1) / ranks**2
        case "all-gather" | "reduce-scatter":
            return (ranks - 1) / ranks
    raise ValueError(
        f"no lower bound is known for the bytes of the collective {kind!r} over {ranks} ranks; add the share that a "
        f"rank receives to `received_share` in predict/data_work.py, and the price to `transfer` in predict/price.py"
    )
