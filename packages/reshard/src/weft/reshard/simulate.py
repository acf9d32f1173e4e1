"""Runs a plan on a dict of shards in one process: what every rank would hold, without a network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from weft.mesh import LayoutError

from .identities import identity
from .plan import Plan
from .steps import AllGather, AllReduce, AllToAll, MakePartial, ReduceScatter, Slice, Step

Shards = dict[int, Tensor]


def simulate(plan: Plan, shards: Mapping[int, Tensor]) -> Shards:
    """Every rank's local tensor after the plan, from every rank's before it.

    Raises LayoutError where a rank is missing or its tensor has not the shape that the source layout gives it.
    """
    for rank in plan.src.mesh.ranks:
        want = plan.src.local_shape(plan.shape, rank)
        got = tuple(shards[rank].shape) if rank in shards else None
        if got != want:
            raise LayoutError(f"rank {rank} brings {got}, but ({plan.src}) of {plan.shape} gives it {want}")
    current = dict(shards)
    for step in plan.steps:
        for group in plan.src.mesh.groups(step.axis):
            parts = [current[rank] for rank in group.ranks]
            current.update(zip(group.ranks, _together(step, parts), strict=True))
    return {rank: current[rank].clone() for rank in plan.src.mesh.ranks}


def _together(step: Step, parts: list[Tensor]) -> list[Tensor]:
    size = len(parts)
    match step:
        case AllGather(dim=dim):
            return [torch.cat(parts, dim)] * size
        case AllReduce(op=op):
            return [_reduce(op, parts)] * size
        case ReduceScatter(dim=dim, op=op):
            return _cut(_reduce(op, parts), size, dim)
        case AllToAll(src_dim=src, dst_dim=dst):
            return _cut(torch.cat(parts, src), size, dst)
        case Slice(dim=dim):
            return [_cut(part, size, dim)[index] for index, part in enumerate(parts)]
        case MakePartial(op="avg"):
            return parts
        case MakePartial(op=op):
            return [parts[0], *(torch.full_like(part, identity(op, part.dtype)) for part in parts[1:])]


def _cut(whole: Tensor, size: int, dim: int) -> list[Tensor]:
    chunks = list(torch.chunk(whole, size, dim)) if whole.shape[dim] else []
    return chunks + [whole.narrow(dim, 0, 0)] * (size - len(chunks))


def _reduce(op: str, parts: list[Tensor]) -> Tensor:
    stacked = torch.stack(parts)
    match op:
        case "sum":
            return stacked.sum(0, dtype=stacked.dtype)
        case "avg":
            return stacked.sum(0, dtype=stacked.dtype) / len(parts)
        case "product":
            return stacked.prod(0, dtype=stacked.dtype)
        case "min":
            return stacked.amin(0)
        case _:
            return stacked.amax(0)
