"""Shards made whole in buckets: those that are gathered over the same ranks travel in one all-gather."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import Layout

from ..planning.costs import padded_part
from ..planning.plan import plan
from ..planning.steps import AllGather, axes_of
from .blocks import assembled, cut_to, padded
from .collectives import Pending, Running, all_gather
from .dtensor import layout_of
from .executor import started
from .groups import group_along, process_mesh, this_rank
from .order import announce


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """A shard, and the layout that it is to have."""

    shard: DTensor
    layout: Layout

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of this rank's local tensor in the layout."""
        return self.layout.local_shape(self.shard.shape, this_rank())


Items = Sequence[tuple[Gather, AllGather]]


class StartedGathers:
    """Gathers under way; made by `start_gathers`."""

    def __init__(self, together: list[tuple[Items, Pending]], alone: list[tuple[Gather, Pending]]) -> None:
        self._together, self._alone = together, alone

    def wait(self) -> Iterator[tuple[Gather, Tensor]]:
        """Each gather with this rank's local tensor, in the order of the collectives. Communication: waits for what was started."""
        for items, pending in self._together:
            gathered, offset = pending.wait(), 0  # [parts, elements]
            for gather, step in items:
                part, leading = _part(gather, step), axes_of(step)
                stop = offset + math.prod(part)
                sizes = [gather.layout.mesh.axis_size(axis) for axis in leading]
                rows = gathered[:, offset:stop].reshape(*sizes, *part)
                yield gather, cut_to(assembled(rows, leading, step), gather.part)
                offset = stop
        for gather, pending in self._alone:
            yield gather, pending.wait()


def start_gathers(gathers: Iterable[Gather]) -> StartedGathers:
    """Starts one collective for all that go over the same ranks in one dtype; what is none or several goes by itself.

    Communication: as said, in the order in which they are given. Ranks outside do nothing.
    """
    buckets: dict[object, list[tuple[Gather, AllGather]]] = {}
    alone: list[Gather] = []
    for each in gathers:
        step = _step(each)
        if step is None:
            alone.append(each)
        else:
            group, _ = group_along(each.shard.device_mesh, axes_of(step))
            buckets.setdefault((group.group_name, each.shard.dtype), []).append((each, step))
    with torch.no_grad():
        together: list[tuple[Items, Pending]] = [(items, _started(items)) for items in buckets.values()]
        return StartedGathers(together, [(each, _started_alone(each)) for each in alone])


def _step(gather: Gather) -> AllGather | None:
    """The one collective that this gather is; None where it is none, or several."""
    src = layout_of(gather.shard)
    if this_rank() not in src.mesh:
        return None
    steps = plan(src, gather.layout, gather.shard.shape, gather.shard.dtype).steps
    step = steps[0] if len(steps) == 1 else None
    return step if isinstance(step, AllGather) and not step.apart else None


def _started(items: Items) -> Pending:
    first, step = items[0]
    meshes = tuple(dict.fromkeys(process_mesh(each.shard.device_mesh) for each, _ in items))
    shapes = [tuple(each.shard.shape) for each, _ in items]
    announce(f"parameters of shapes {shapes}, {first.shard.dtype}, gathered over {axes_of(step)}", meshes=meshes)
    return Pending(_run(items))


def _run(items: Items) -> Running:
    first, step = items[0]
    parts = [padded(each.shard.to_local(), _part(each, its)).reshape(-1) for each, its in items]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (yield from all_gather(flat, [group_along(first.shard.device_mesh, axes_of(step))]))


def _part(gather: Gather, step: AllGather) -> list[int]:
    return padded_part(step, layout_of(gather.shard), gather.part)


def _started_alone(gather: Gather) -> Pending:
    made = plan(layout_of(gather.shard), gather.layout, gather.shard.shape, gather.shard.dtype)
    return started(made, gather.shard.to_local(), gather.shard.device_mesh)
