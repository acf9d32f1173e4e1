"""Runs a plan in a single process on a dict of shards, without a network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from weft.mesh import Layout, LayoutError

from .costs import dual_messages
from .exchange import messages_of, relative_box
from .layouts import identity, reduce_parts
from .plan import Plan
from .steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    MakePartial,
    Permute,
    ReduceExchange,
    ReduceScatter,
    Relabel,
    Slice,
    Step,
    axes_of,
    dims_of,
    layout_after,
)

Shards = dict[int, Tensor]


def simulate(plan: Plan, shards: Mapping[int, Tensor]) -> Shards:
    """The local tensors of all ranks of the target mesh after the plan.

    shards: the local tensors of all ranks of the source mesh.
    Raises LayoutError where a rank is missing, or where a rank's tensor does not have the shape of the rank's part of
    the source.
    """
    for rank in plan.src.mesh.ranks:
        expected_shape = plan.src.local_shape(plan.shape, rank)
        shape = tuple(shards[rank].shape) if rank in shards else None
        if shape != expected_shape:
            raise LayoutError(
                f"rank {rank} has a tensor of shape {shape}, but ({plan.src}) of {plan.shape} gives it {expected_shape}"
            )
    current = dict(shards)
    for step, layout in zip(plan.steps, plan.layouts, strict=True):
        current = _apply_step(step, layout, plan.shape, current)
    return {rank: current[rank].clone() for rank in plan.dst.mesh.ranks}


def _apply_step(step: Step, layout: Layout, shape: tuple[int, ...], current: Shards) -> Shards:
    """All ranks' tensors after the step."""
    match step:
        case AllToAll() | Exchange() | Permute() | Relabel():
            return _apply_exchange(layout, layout_after(step, layout), shape, current)
        case ReduceExchange():
            return _apply_reduce_exchange(layout, step, shape, current)
        case AllGather() | ReduceScatter():
            # Axis by axis, which has the same result as any collectives that run the step.
            changes = list(zip(axes_of(step), dims_of(step), strict=True))
            for axis, dim in reversed(changes) if isinstance(step, AllGather) else changes:
                for group in layout.mesh.groups(axis):
                    parts = [current[rank] for rank in group.ranks]
                    if isinstance(step, AllGather):
                        results = [torch.cat(parts, dim)] * len(parts)
                    else:
                        results = _cut(reduce_parts(step.op, torch.stack(parts)), len(parts), dim)
                    current = current | dict(zip(group.ranks, results, strict=True))
            return current
        case AllReduce(op=op):
            for axis in axes_of(step):
                for group in layout.mesh.groups(axis):
                    full = reduce_parts(op, torch.stack([current[rank] for rank in group.ranks]))
                    current = current | dict.fromkeys(group.ranks, full)
            return current
        case Slice() | MakePartial():
            return {
                rank: part
                for group in layout.mesh.groups(step.axis)
                for rank, part in zip(
                    group.ranks, _apply_local(step, [current[rank] for rank in group.ranks]), strict=True
                )
            }


def _apply_local(step: Slice | MakePartial, parts: list[Tensor]) -> list[Tensor]:
    """The tensors of a group's ranks after a step without communication."""
    match step:
        case Slice(dim=dim):
            return [_cut(part, len(parts), dim)[index] for index, part in enumerate(parts)]
        case MakePartial(op="avg"):
            return parts
        case MakePartial(dim=None, op=op):
            return [parts[0], *(torch.full_like(part, identity(op, part.dtype)) for part in parts[1:])]
        case MakePartial(dim=int(dim), op=op):
            empty = [torch.full_like(part, identity(op, part.dtype)) for part in parts]
            return [torch.cat([*empty[:i], part, *empty[i + 1 :]], dim) for i, part in enumerate(parts)]
    raise AssertionError(f"{step} has an int or None as its dim")


def _apply_exchange(src: Layout, dst: Layout, shape: tuple[int, ...], current: Shards) -> Shards:
    """All ranks' tensors after an exchange of `src` for `dst`."""
    after = {}
    for rank in dst.mesh.ranks:
        messages, needed = messages_of(src, dst, shape, rank), dst.local_slices(shape, rank)
        after[rank] = next(iter(current.values())).new_empty(dst.local_shape(shape, rank))
        for sender, box in [*messages.receives, *([(rank, messages.local)] if messages.local is not None else [])]:
            assert box is not None, "a local box is listed only where there is one"
            after[rank][relative_box(box, needed)] = current[sender][relative_box(box, src.local_slices(shape, sender))]
    return after


def _apply_reduce_exchange(layout: Layout, step: ReduceExchange, shape: tuple[int, ...], current: Shards) -> Shards:
    """All ranks' tensors after a ReduceExchange: the dual exchange's messages go back, and are added up."""
    after = {}
    for rank in step.target.mesh.ranks:
        messages, needed = dual_messages(layout, step, shape, rank), step.target.local_slices(shape, rank)
        after[rank] = next(iter(current.values())).new_zeros(step.target.local_shape(shape, rank))
        for sender, box in [*messages.sends, *([(rank, messages.local)] if messages.local is not None else [])]:
            assert box is not None, "a local box is listed only where there is one"
            held = layout.local_slices(shape, sender)
            after[rank][relative_box(box, needed)] += current[sender][relative_box(box, held)]
    return after


def _cut(tensor: Tensor, size: int, dim: int) -> list[Tensor]:
    """`tensor` cut by torch.chunk into `size` parts, with the empty parts that torch.chunk leaves out."""
    chunks = list(torch.chunk(tensor, size, dim)) if tensor.shape[dim] else []
    return chunks + [tensor.narrow(dim, 0, 0)] * (size - len(chunks))
