"""Shards made whole in bundles: those that are gathered over the same ranks in one dtype travel in one all-gather."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import Layout

from ..planning.costs import padded_part
from ..planning.plan import plan
from ..planning.steps import AllGather, axes_of
from .blocks import stacking_of
from .collectives import Pending, start_all_gather
from .dtensor import layout_of, memory_of
from .executor import started
from .groups import group_along, process_mesh, this_rank
from .order import Words, announce
from .waits import wait_for


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """A shard, the layout that it is to have, and the memory that takes this rank's part of that, which may come and go."""

    shard: DTensor
    layout: Layout
    into: Tensor


class Gathers:
    """What gathers the same shards again and again: all that does not change from one time to the next is found once.

    Communication: one collective for all shards that go over the same ranks in one dtype, in the order in which they are given;
    what is none or several goes by itself. Ranks outside do nothing.
    """

    def __init__(self, gathers: Iterable[Gather]) -> None:
        bundles: dict[object, list[tuple[Gather, AllGather]]] = {}
        self._alone: list[Gather] = []
        for each in gathers:
            step = _step(each)
            if step is None:
                self._alone.append(each)
            else:
                group, _ = group_along(each.shard.device_mesh, axes_of(step))
                bundles.setdefault((group.group_name, each.shard.dtype), []).append((each, step))
        with torch.no_grad(), torch.inference_mode(False):  # buffers that are born in it could be filled in it alone
            self._bundles = [_Bundle(items) for items in bundles.values()]
        self._pending: list[tuple[Gather, Pending]] = []

    def start(self) -> None:
        """Starts the collectives, of what the shards are now."""
        with torch.no_grad():
            for bundle in self._bundles:
                bundle.start()
            self._pending = [(each, _started(each)) for each in self._alone]

    def finish(self) -> None:
        """Waits for them, and fills `into` of each gather."""
        with torch.no_grad():
            for bundle in self._bundles:
                bundle.finish()
            for each, pending in self._pending:
                each.into.copy_(pending.wait())
            self._pending = []

    def give_up(self) -> None:
        """Waits for them, and fills nothing."""
        for bundle in self._bundles:
            bundle.give_up()
        for _, pending in self._pending:
            pending.wait()
        self._pending = []


class _Bundle:
    """One all-gather: each rank's parts of all shards, one after the other, are a row of a buffer.

    The buffer has memory while it is used. Its views, and those of what they are copied to, are made once: each costs the host
    as much as a small copy.
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
        parts = [_part(each, its) for each, its in items]
        sizes = [math.prod(part) for part in parts]
        self._buffer = first.into.new_empty((len(ranks), sum(sizes)))
        self._flat = self._buffer.view(-1)
        self._mine = self._buffer[self._group.rank()]
        self._places: list[Tensor] = []  # of this rank's shards in its row
        self._received: list[Tensor] = []  # what is copied, and where to
        self._filled: list[Tensor] = []
        columns = zip(torch.split(self._buffer, sizes, 1), torch.split(self._mine, sizes), parts, items, strict=True)
        for rows, mine, part, (each, its) in columns:
            held = each.shard.to_local().shape
            self._places.append(mine.view(part)[tuple(slice(size) for size in held)])
            sizes_along = tuple(each.layout.mesh.axis_size(axis) for axis in axes_of(its))
            stacking = stacking_of(tuple(part), axes_of(its), sizes_along, its)
            _, positions = group_along(each.shard.device_mesh, axes_of(its))  # the axes come in an order of its own
            for received, filled in stacking.pairs(rows, each.into, positions):
                self._received.append(received)
                self._filled.append(filled)
        self._storage = self._buffer.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._storage.resize_(0)
        self._work: dist.Work | None = None

    def start(self) -> None:
        announce(Words(self._words), meshes=self._meshes)
        self._storage.resize_(self._nbytes)
        torch._foreach_copy_(self._places, self._parts)
        # In place, as NCCL documents it: a rank's input is its row of the output. gloo copies nothing then either.
        self._work = start_all_gather(self._flat, self._mine, self._group)

    def finish(self) -> None:
        self._wait()
        torch._foreach_copy_(self._filled, self._received)
        self._storage.resize_(0)

    def give_up(self) -> None:
        self._wait()
        self._storage.resize_(0)

    def _words(self) -> str:
        shapes = [tuple(shard.shape) for shard in self._shards]
        return f"parameters of shapes {shapes}, {self._shards[0].dtype}, gathered over {self._axes}"

    def _wait(self) -> None:
        wait_for(self._work)
        self._work = None


def _step(gather: Gather) -> AllGather | None:
    """The one collective that this gather is; None where it is none, or several."""
    src = layout_of(gather.shard)
    if this_rank() not in src.mesh:
        return None
    steps = plan(src, gather.layout, gather.shard.shape, gather.shard.dtype).steps
    step = steps[0] if len(steps) == 1 else None
    return step if isinstance(step, AllGather) and not step.apart else None


def _part(gather: Gather, step: AllGather) -> list[int]:
    return padded_part(step, layout_of(gather.shard), gather.layout.local_shape(gather.shard.shape, this_rank()))


def _started(gather: Gather) -> Pending:
    made = plan(layout_of(gather.shard), gather.layout, gather.shard.shape, gather.shard.dtype)
    return started(made, gather.shard.to_local(), gather.shard.device_mesh)
