"""Runs a plan's steps on this rank's local tensor, by torch.distributed."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout
from weft.mesh.extents import chunk, chunk_sizes

from .groups import axis_group, this_rank
from .identities import identity
from .plan import Plan
from .steps import AllGather, AllReduce, AllToAll, MakePartial, ReduceScatter, Slice, Step, follow

# torch 2.13 renamed these; 2.11 and 2.12 have the old names only
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # then divided: gloo has no average
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def execute(plan: Plan, local: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's local tensor after the plan; `local` itself is not changed.

    Communication: the plan's steps, in order. A rank outside the mesh does nothing.
    """
    if this_rank() not in plan.src.mesh:
        return local
    for step, layout in zip(plan.steps, plan.layouts, strict=True):
        local = _run(step, layout, plan.shape, local, mesh)
    return local


def _run(step: Step, layout: Layout, shape: tuple[int, ...], local: Tensor, mesh: DeviceMesh) -> Tensor:
    size = layout.mesh.axis_size(step.axis)
    coordinate = layout.mesh.coordinate(this_rank())
    assert coordinate is not None, "execute returns early on ranks outside the mesh"
    index = coordinate[step.axis]
    group = axis_group(mesh, step.axis)
    order = _order(layout, step.axis, group)
    match step:
        case AllGather(dim=dim):
            whole = follow(step, layout).local_shape(shape, this_rank())[dim]
            return _all_gather(local, whole, dim, order, group)
        case AllReduce(op=op):
            reduced = local.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(reduced, REDUCE_OPS[op], group)
            return reduced / size if op == "avg" else reduced
        case ReduceScatter(dim=dim, op=op):
            scattered = _reduce_scatter(local, dim, order, index, op, group)
            return scattered / size if op == "avg" else scattered
        case AllToAll(src_dim=src, dst_dim=dst):
            whole = follow(step, layout).local_shape(shape, this_rank())[src]
            return _all_to_all(local, whole, src, dst, order, index, group)
        case Slice(dim=dim):
            start, stop = chunk(local.shape[dim], size, index)
            return local.narrow(dim, start, stop - start).contiguous()
        case MakePartial(op=op):
            return local if index == 0 or op == "avg" else torch.full_like(local, identity(op, local.dtype))


def _order(layout: Layout, axis: str, group: dist.ProcessGroup) -> list[int]:
    """The index along `axis` of each member of the group: torch sorts the ranks of a group, a mesh may not."""
    coordinates = [layout.mesh.coordinate(rank) for rank in dist.get_process_group_ranks(group)]
    return [coordinate[axis] for coordinate in coordinates if coordinate is not None]


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _reordered(rows: Tensor, order: list[int]) -> Tensor:
    """`rows` in len(order) equal blocks, of which block order[i] comes at i."""
    if order == list(range(len(order))):
        return rows
    blocks = rows.reshape(len(order), rows.shape[0] // len(order), *rows.shape[1:])
    return blocks[order].reshape(rows.shape)


def _all_gather(local: Tensor, whole: int, dim: int, order: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows padded to the first rank's; only the last rows of the result are padding, as only the last chunks are short."""
    rows = _pad(local.movedim(dim, 0), -(-whole // len(order)))
    gathered = rows.new_empty((len(order) * rows.shape[0], *rows.shape[1:]))
    all_gather_single(gathered, rows, group)
    return _reordered(gathered, _inverse(order))[:whole].movedim(0, dim).contiguous()


def _reduce_scatter(local: Tensor, dim: int, order: list[int], index: int, op: str, group: dist.ProcessGroup) -> Tensor:
    start, stop = chunk(local.shape[dim], len(order), index)
    step = -(-local.shape[dim] // len(order))
    rows = _reordered(_pad(local.movedim(dim, 0), step * len(order)), order)
    scattered = rows.new_empty((step, *rows.shape[1:]))
    reduce_scatter_single(scattered, rows, REDUCE_OPS[op], group)
    return scattered[: stop - start].movedim(0, dim).contiguous()


def _all_to_all(
    local: Tensor, whole: int, src: int, dst: int, order: list[int], index: int, group: dist.ProcessGroup
) -> Tensor:
    """Uneven parts as they are: the element counts of both sides follow from the layouts."""
    size = len(order)
    pieces = torch.split(local, chunk_sizes(local.shape[dst], size), dst)
    outgoing = [pieces[i].reshape(-1) for i in order]
    start, stop = chunk(local.shape[dst], size, index)
    rows = chunk_sizes(whole, size)
    shapes = []
    for i in order:
        shape = list(local.shape)
        shape[src], shape[dst] = rows[i], stop - start
        shapes.append(shape)
    counts = [math.prod(shape) for shape in shapes]
    received = local.new_empty(sum(counts))
    dist.all_to_all_single(received, torch.cat(outgoing), counts, [piece.numel() for piece in outgoing], group)
    parts = [piece.reshape(shape) for piece, shape in zip(torch.split(received, counts), shapes, strict=True)]
    return torch.cat([parts[i] for i in _inverse(order)], src)


def _pad(rows: Tensor, count: int) -> Tensor:
    if rows.shape[0] == count:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros((count - rows.shape[0], *rows.shape[1:]))])
