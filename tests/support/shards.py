"""Oracle of layouts: cuts whole tensors into every rank's part by torch.chunk, and puts the parts together again.

Shares no code with the layouts under test. Reads only their placements, shard order and coordinates.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from weft.mesh import Layout, Partial, Placement, ProcessMesh, Replicate, Shard


def every_layout(mesh: ProcessMesh, ndim: int, partials: Iterable[Partial] = (Partial("sum"),)) -> list[Layout]:
    """All layouts of tensors with `ndim` dims, in all shard orders."""
    options: list[Placement] = [Replicate(), *map(Shard, range(ndim)), *partials]
    layouts: dict[Layout, None] = {}
    for names in itertools.permutations(mesh.axis_names):
        for placements in itertools.product(options, repeat=mesh.ndim):
            layouts[Layout(mesh, ", ".join(f"{n}: {p}" for n, p in zip(names, placements, strict=True)))] = None
    return list(layouts)


def pairs_of(layouts: Sequence[Layout]) -> list[tuple[Layout, Layout]]:
    """All pairs of a source and a target layout, up to the numbering of the tensor's dims.

    In the sources, axes shard dim 0 first, then 1, then 2. Any other pair becomes such a pair by renumbering the dims
    of layouts and shape.
    """
    sources = []
    for layout in layouts:
        dims = list(dict.fromkeys(p.dim for p in layout.placements if isinstance(p, Shard)))
        if dims == list(range(len(dims))):
            sources.append(layout)
    return list(itertools.product(sources, layouts))


def whole_of(shape: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of small integers from -11 to 11, unequal to its neighbours."""
    values = torch.arange(torch.Size(shape).numel()).mul(37).remainder(23).sub(11)
    return values.reshape(tuple(shape)).to(dtype)


def chunks(whole: Tensor, count: int, dim: int) -> list[Tensor]:
    """torch.chunk, with the empty parts left out by torch.chunk."""
    parts = list(torch.chunk(whole, count, dim)) if whole.shape[dim] else []
    return parts + [whole.narrow(dim, 0, 0)] * (count - len(parts))


def addends(whole: Tensor, op: str, count: int) -> list[Tensor]:
    """`count` different tensors whose reduction by `op` is `whole`; exact for integers."""
    noise = [
        torch.arange(whole.numel()).reshape(whole.shape).add(3 * i).remainder(7).to(whole.dtype) for i in range(count)
    ]
    if op == "sum":
        return [whole - sum(noise[1:]), *noise[1:]]
    if op == "avg":
        return [whole * count - sum(noise[1:]), *noise[1:]]
    if op == "product":
        signs = [1 - 2 * part.remainder(2) for part in noise[1:]]
        return [functools.reduce(torch.mul, signs, whole), *signs]
    step = 1 if op == "min" else -1
    order = torch.arange(whole.numel()).reshape(whole.shape).mul(7).floor_divide(5)
    owner = order.remainder(count)  # index of the least, or greatest, addend; varies along every dim
    return [torch.where(owner == i, whole, whole + step * (part + 1)) for i, part in enumerate(noise)]


def split(whole: Tensor, layout: Layout) -> dict[int, Tensor]:
    """Every rank's part of `whole`. Where the layout is Partial, different parts that reduce to the whole."""
    by_index: dict[tuple[int, ...], Tensor] = {(): whole}
    partial = _partial_axes(layout)
    for axis in partial:
        placement = layout[axis]
        assert isinstance(placement, Partial)
        size = layout.mesh.axis_size(axis)
        by_index = {
            (*index, i): part
            for index, value in by_index.items()
            for i, part in enumerate(addends(value, placement.op, size))
        }
    return {rank: _cut(by_index[_index(layout, rank, partial)], layout, rank) for rank in layout.mesh.ranks}


def rebuild(parts: Mapping[int, Tensor], layout: Layout, shape: Sequence[int]) -> Tensor:
    """The whole tensor from every rank's part. Asserts that replicas are equal and that no element is missing."""
    partial = _partial_axes(layout)
    where = torch.arange(torch.Size(shape).numel()).reshape(tuple(shape))
    wholes: dict[tuple[int, ...], Tensor] = {}
    written: dict[tuple[int, ...], Tensor] = {}
    for rank in layout.mesh.ranks:
        index = _index(layout, rank, partial)
        if index not in wholes:
            wholes[index] = torch.zeros(where.numel(), dtype=parts[rank].dtype)
            written[index] = torch.zeros(where.numel(), dtype=torch.bool)
        mine = _cut(where, layout, rank)
        assert mine.shape == parts[rank].shape, f"rank {rank} holds {tuple(parts[rank].shape)}, not {tuple(mine.shape)}"
        cells, values = mine.reshape(-1), parts[rank].reshape(-1)
        repeated = written[index][cells]
        assert torch.equal(wholes[index][cells][repeated], values[repeated]), f"rank {rank} holds a different replica"
        wholes[index][cells] = values
        written[index][cells] = True
    assert all(bool(seen.all()) for seen in written.values()), "some elements are on no rank"
    if not partial:
        return wholes[()].reshape(tuple(shape))
    placement = layout[partial[0]]
    assert isinstance(placement, Partial)
    stacked = torch.stack(list(wholes.values()))
    reduced = {
        "sum": lambda: stacked.sum(0, dtype=stacked.dtype),
        "avg": lambda: stacked.mean(0, dtype=stacked.dtype),
        "product": lambda: stacked.prod(0, dtype=stacked.dtype),
        "min": lambda: stacked.amin(0),
        "max": lambda: stacked.amax(0),
    }[placement.op]()
    return reduced.reshape(tuple(shape))


def _partial_axes(layout: Layout) -> list[str]:
    return [axis for axis in layout.mesh.axis_names if isinstance(layout[axis], Partial)]


def _index(layout: Layout, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    coordinate = layout.mesh.coordinate(rank)
    assert coordinate is not None
    return tuple(coordinate[axis] for axis in axes)


def _cut(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    for dim, axes in layout.shard_order.items():
        for axis, index in zip(axes, _index(layout, rank, axes), strict=True):
            whole = chunks(whole, layout.mesh.axis_size(axis), dim)[index]
    return whole
