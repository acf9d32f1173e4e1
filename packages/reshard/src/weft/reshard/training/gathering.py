"""All-gathers sharded parameters into buffers.

Parameters gathered over the same ranks in the same dtype share a collective. A unit (unit.py) runs a `GatherBatch`
before each forward or backward of the unit's module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import Layout

from ..moving.collectives import Pending, start_all_gather
from ..moving.dtensor import layout_of, memory_of
from ..moving.executor import start_plan
from ..moving.order_check import LazyText, announce
from ..moving.transfer import stacking_of
from ..moving.waits import wait_for
from ..planning.costs import padded_part
from ..planning.plan import plan
from ..planning.steps import AllGather, axes_of
from ..world.groups import group_along, process_mesh, this_rank


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """A shard to gather, the layout of the result, and the buffer for this rank's part of the result."""

    shard: DTensor
    layout: Layout  # of the result
    into: Tensor  # receives this rank's part; may have no memory between gathers


class GatherBatch:
    """Gathers of several shards into the same buffers, run many times. Groups, shapes and views are computed once.

    Communication: one all-gather for all shards gathered over the same ranks in one dtype, in the order given. A gather
    whose plan is not a single all-gather runs by itself. Ranks outside the shards' meshes do nothing.
    """

    def __init__(self, gathers: Iterable[Gather]) -> None:
        bundles: dict[object, list[tuple[Gather, AllGather]]] = {}
        self._single: list[Gather] = []
        for each in gathers:
            step = _step(each)
            if step is None:
                self._single.append(each)
            else:
                group, _ = group_along(each.shard.device_mesh, axes_of(step))
                bundles.setdefault((group.group_name, each.shard.dtype), []).append((each, step))
        with torch.no_grad(), torch.inference_mode(False):  # a buffer made in inference mode could be filled only there
            self._bundles = [_Bundle(items) for items in bundles.values()]
        self._pending: list[tuple[Gather, Pending]] = []

    def start(self) -> None:
        """Starts to gather the present values of the shards."""
        with torch.no_grad():
            for bundle in self._bundles:
                bundle.start()
            self._pending = [(each, _start_plan(each)) for each in self._single]

    def finish(self) -> None:
        """Waits for the collectives, and fills the buffers (`Gather.into`)."""
        with torch.no_grad():
            for bundle in self._bundles:
                bundle.finish()
            for each, pending in self._pending:
                each.into.copy_(pending.wait())
            self._pending = []

    def discard(self) -> None:
        """Waits for the collectives, and fills nothing."""
        for bundle in self._bundles:
            bundle.discard()
        for _, pending in self._pending:
            pending.wait()
        self._pending = []


class _Bundle:
    """A single all-gather of several shards: a row of the buffer holds a rank's parts of all shards, concatenated.

    The buffer has memory only from start to finish. All views are made once, as each costs the host as much as a small
    copy.
    """

    def __init__(self, items: Sequence[tuple[Gather, AllGather]]) -> None:
        first, step = items[0]
        self._group, ranks = group_along(first.shard.device_mesh, axes_of(step))
        self._shards = [each.shard for each, _ in items]
        self._parts = [memory_of(shard) for shard in self._shards]
        self._axes, self._meshes = (
            axes_of(step),
            tuple(dict.fromkeys(process_mesh(e.device_mesh) for e in self._shards)),
        )
        parts = [_part(each, gather_step) for each, gather_step in items]
        sizes = [math.prod(part) for part in parts]
        self._buffer = first.into.new_empty((len(ranks), sum(sizes)))
        self._flat = self._buffer.view(-1)
        self._own_row = self._buffer[self._group.rank()]
        self._slots: list[Tensor] = []  # views of this rank's row, one for each shard
        self._sources: list[Tensor] = []  # views of the buffer, each copied to the target of its index
        self._targets: list[Tensor] = []  # views of the buffers to fill
        columns = zip(torch.split(self._buffer, sizes, 1), torch.split(self._own_row, sizes), parts, items, strict=True)
        for rows, own_row, part, (each, gather_step) in columns:
            held = each.shard.to_local().shape
            self._slots.append(own_row.view(part)[tuple(slice(size) for size in held)])
            sizes_along = tuple(each.layout.mesh.axis_size(axis) for axis in axes_of(gather_step))
            stacking = stacking_of(tuple(part), axes_of(gather_step), sizes_along, gather_step)
            # Positions follow the order of the axes, in which the steps of a bundle may differ.
            _, positions = group_along(each.shard.device_mesh, axes_of(gather_step))
            for received, filled in stacking.view_pairs(rows, each.into, positions):
                self._sources.append(received)
                self._targets.append(filled)
        self._storage = self._buffer.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._storage.resize_(0)
        self._work: dist.Work | None = None

    def start(self) -> None:
        announce(LazyText(self._description), meshes=self._meshes)
        self._storage.resize_(self._nbytes)
        torch._foreach_copy_(self._slots, self._parts)
        # In place, as NCCL documents: a rank's input is its row of the output. Then gloo copies nothing either.
        self._work = start_all_gather(self._flat, self._own_row, self._group)

    def finish(self) -> None:
        self._wait()
        torch._foreach_copy_(self._targets, self._sources)
        self._storage.resize_(0)

    def discard(self) -> None:
        self._wait()
        self._storage.resize_(0)

    def _description(self) -> str:
        shapes = [tuple(shard.shape) for shard in self._shards]
        return f"parameters of shapes {shapes}, {self._shards[0].dtype}, gathered over {self._axes}"

    def _wait(self) -> None:
        wait_for(self._work)
        self._work = None


def _step(gather: Gather) -> AllGather | None:
    """This gather's plan, if the plan is a single all-gather; else None."""
    src = layout_of(gather.shard)
    if this_rank() not in src.mesh:
        return None
    steps = plan(src, gather.layout, gather.shard.shape, gather.shard.dtype).steps
    step = steps[0] if len(steps) == 1 else None
    return step if isinstance(step, AllGather) and not step.apart else None


def _part(gather: Gather, step: AllGather) -> list[int]:
    return padded_part(step, layout_of(gather.shard), gather.layout.local_shape(gather.shard.shape, this_rank()))


def _start_plan(gather: Gather) -> Pending:
    gather_plan = plan(layout_of(gather.shard), gather.layout, gather.shard.shape, gather.shard.dtype)
    return start_plan(gather_plan, gather.shard.to_local(), gather.shard.device_mesh)
