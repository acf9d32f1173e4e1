"""Scales work on parameters from a run of few blocks to the whole model: gathers, sums of gradients, and the norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from .events import Compute, Event, Segment, Start, Wait
from .observer import ModelPart, Placed


def of_whole_model(placed: Sequence[Placed], held: Mapping[ModelPart, int], *, by_part: bool) -> list[Placed]:
    """The events of a run of few blocks, with work on all parameters at once scaled to the whole model's bytes.

    Scaled are the norm of gradients, and the sum of all gradients at once, as in a small model, which sums without
    regard to blocks.
    held: bytes of this rank's parameters in each part that ran, from `Observer.add_update`.
    by_part: for stages, cut the work into an event for each part of the model instead, and so the gather of all
        parameters before the first block.
    """
    run = sum(held.values())
    whole = sum(nbytes * (1 if block is None else len(block.blocks)) for (block, _), nbytes in held.items())
    if not run:
        return list(placed)
    sums_whole = not any(_is_sum(each.event) and each.block for each in placed)

    def kind_of(each: Placed) -> str | None:
        """The kind of work on all parameters at once; None for further events."""
        if sums_whole and _is_sum(each.event):
            return "sum"
        if _is_norm(each):
            return "norm"
        if by_part and _is_gather(each):
            return "gather" if isinstance(each.event, Start) else "copy"
        return None

    if not by_part:
        return [
            replace(each, event=replace(each.event, nbytes=each.event.nbytes * whole // run))
            if kind_of(each) and not isinstance(each.event, Wait)
            else each
            for each in placed
        ]
    totals: Counter[str] = Counter()
    for each in placed:
        kind = kind_of(each)
        if kind and not isinstance(each.event, Wait):
            totals[kind] += each.event.nbytes
    number = 1 + max((each.event.number for each in placed if not isinstance(each.event, Compute)), default=0)
    result: list[Placed] = []
    dropped: set[int] = set()  # numbers of collectives replaced by those of the parts
    for each in placed:
        event, kind = each.event, kind_of(each)
        if isinstance(event, Wait):
            result += [] if event.number in dropped else [each]
            continue
        if kind is None:
            result.append(each)
            continue
        if isinstance(event, Start):
            dropped.add(event.number)
        for (block, place), nbytes in held.items() if kind in totals else ():
            own = replace(event, nbytes=totals[kind] * nbytes // run)
            at_part = replace(each, block=block, place=place)
            if isinstance(own, Start):
                result += [
                    replace(at_part, event=replace(own, number=number)),
                    replace(at_part, event=Wait(number=number)),
                ]
                number += 1
            else:
                result.append(replace(at_part, event=own))
        totals.pop(kind, None)
    return result


def _is_sum(event: Event) -> bool:
    return isinstance(event, Start) and event.purpose == "gradients"


def _is_norm(placed: Placed) -> bool:
    event = placed.event
    return placed.phase == "gradients" and isinstance(event, Compute) and event.name.startswith("aten._foreach")


def _is_gather(placed: Placed) -> bool:
    event = placed.event
    if isinstance(event, Start):
        return event.purpose == "parameters"
    return placed.phase == "forward" and isinstance(event, Compute) and event.name.startswith("aten._foreach")


def sum_after_backward(placed: Sequence[Placed]) -> list[Placed]:
    """Move the sums of gradients behind all microbatches, as in a pipeline's stage.

    Each sum is then of the phase "gradients", and stays with the block whose gradients are summed.
    """
    sums = {
        each.event.number
        for each in placed
        if isinstance(each.event, Start) and each.event.purpose == "gradients" and each.phase == "backward"
    }
    moved = [each for each in placed if not isinstance(each.event, Compute) and each.event.number in sums]
    stay = [each for each in placed if isinstance(each.event, Compute) or each.event.number not in sums]
    end = next(i for i, each in enumerate([*stay, None]) if each is None or each.phase in ("gradients", "optimizer"))
    return [*stay[:end], *(replace(each, phase="gradients", microbatch=-1) for each in moved), *stay[end:]]


def in_buckets(segments: Sequence[Segment], bucket_bytes: int) -> tuple[Segment, ...]:
    """Merge sums of gradients into buckets of `bucket_bytes`: sums of the same kind and group within a segment.

    A bucket's sum starts where the bucket is full, or at the bucket's last sum in the segment. The wait is at the first
    wait for any of the bucket's sums after the start.
    """
    bucket_of: dict[int, int] = {}  # number of a sum -> number of the bucket, which is the first sum's
    buckets: dict[int, tuple[int, Start]] = {}  # number of a bucket -> number of the last sum, start of the bucket
    for segment in segments:
        open_buckets: dict[tuple[str, str], Start] = {}
        for event in segment.events:
            if isinstance(event, Start) and event.purpose == "gradients":
                key = event.kind, event.group
                first = open_buckets.get(key)
                bucket = event if first is None else replace(first, nbytes=first.nbytes + event.nbytes)
                bucket_of[event.number], buckets[bucket.number] = bucket.number, (event.number, bucket)
                if bucket.nbytes < bucket_bytes:
                    open_buckets[key] = bucket
                else:
                    open_buckets.pop(key, None)
    started: set[int] = set()
    awaited: set[int] = set()

    def merged(event: Event) -> Iterator[Event]:
        if isinstance(event, Compute) or event.number not in bucket_of:
            yield event
            return
        number = bucket_of[event.number]
        last, bucket = buckets[number]
        if isinstance(event, Start):
            if event.number == last:
                started.add(number)
                yield bucket
        elif number in started and number not in awaited:
            awaited.add(number)
            yield Wait(number=number)

    return tuple(
        replace(segment, events=tuple(one for event in segment.events for one in merged(event))) for segment in segments
    )
