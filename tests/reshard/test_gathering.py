"""Shards of many layouts made whole together, in as few collectives as there are groups of ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute
from weft.reshard.training.gathering import Gather, GatherBatch

from tests.support.collectives import Collectives
from tests.support.pool import Pool

MESHES = [{"dp": 3, "cp": 2}, {"cp": 2, "dp": 3}, {"a": 2, "b": 2, "c": 2}]
SHAPES = [(6, 12, 2), (5, 7)]


def sharded(mesh: ProcessMesh) -> list[Layout]:
    """Every way to shard dims 0 and 1, with the axes in the mesh's order and in the reverse."""
    found = []
    for places in product("R01", repeat=mesh.ndim):
        words = [
            f"{axis}: {'R' if dim == 'R' else f'S({dim})'}" for axis, dim in zip(mesh.axis_names, places, strict=True)
        ]
        found += [Layout(mesh, ", ".join(words)), Layout(mesh, ", ".join(reversed(words)))]
    return list(dict.fromkeys(found))


def gathered(axes: dict[str, int]) -> tuple[list[str], int]:
    """Cases that come out wrong when one call gathers all, twice with new values; and the collectives of a call."""
    mesh = ProcessMesh.grid(**axes)
    cases = [(layout, shape) for layout in sharded(mesh) for shape in SHAPES]
    truths = [torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) for _, shape in cases]
    shards = [distribute(truth, layout) for truth, (layout, _) in zip(truths, cases, strict=True)]
    memory: list[Tensor] = [torch.full_like(truth, -1) for truth in truths]
    gathers = GatherBatch(Gather(shard, Layout(mesh), into) for shard, into in zip(shards, memory, strict=True))
    wrong = []
    for scale in (1, 3):
        for shard in shards:
            shard.to_local().mul_(scale)
        with Collectives() as seen:
            gathers.start()
            gathers.finish()
        for (layout, shape), truth, found in zip(cases, truths, memory, strict=True):
            if not torch.equal(found, truth * scale):
                wrong.append(f"{shape} as ({layout})")
    return wrong, len(seen.kinds)


@pytest.mark.few(1)
@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "-".join(f"{axis}{size}" for axis, size in axes.items()))
def test_shards_whose_axes_come_in_other_orders_travel_together(axes: dict[str, int], pool: Pool) -> None:
    found: list[Any] = pool.run(gathered, axes, ranks=ProcessMesh.grid(**axes).size)
    assert [wrong for wrong, _ in found] == [[]] * len(found)
    alone = len(SHAPES) * len(sharded(ProcessMesh.grid(**axes)))
    assert all(issued < alone for _, issued in found)
