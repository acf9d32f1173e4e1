"""Batches laid out for a plan: rows over the axes of data, tokens over "cp" in an order in which causal work is even."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.kernels.order import Runs, as_laid, as_read
from weft.mesh import Layout, ProcessMesh, Shard
from weft.mesh.extents import chunk
from weft.reshard.running.dtensor import as_process_mesh, wrap
from weft.reshard.running.groups import this_rank

from .plan import ParallelPlan
from .styles import CONTEXT_AXIS, TENSOR_AXIS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderedPositions:
    """The positions of tokens that lie in another order than they are read in.

    values: [B, T] of ints, as the tokens lie. order: the runs of neighbours, [start, stop) of the sequence, as they lie.
    """

    values: DTensor
    order: Runs


_ORDER = "_order_of_tokens"  # an attribute of tokens that lie in another order than they are read in


def order_of(tokens: Tensor) -> Runs | None:
    """The order that tokens of `lay_out_batch` carry; None where they lie as they are read."""
    order: Runs | None = getattr(tokens, _ORDER, None)
    return order


def in_order(tokens: DTensor, order: Runs | None) -> DTensor:
    """The tokens, which carry the order in which they lie."""
    if order is not None:
        setattr(tokens, _ORDER, order)
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """What a model and its loss are given, as the plan wants it: `model(batch.tokens, positions=batch.positions, ...)`.

    tokens, targets: [B, T], plain on a mesh of one process. positions, documents: None where the model needs none.
    The tokens carry their order, so that a model without `positions=` counts them as they are read. A copy of the tokens does not.
    order: the runs of tokens, [start, stop) of the sequence, in the order in which they lie; None where they lie as they are read.
    """

    tokens: Tensor
    targets: Tensor | None
    positions: Tensor | OrderedPositions | None
    documents: Tensor | None
    order: Runs | None

    def as_read(self, whole: Tensor) -> Tensor:
        """A plain tensor [B, T, ...] of all tokens, such as `to_global(logits)`, with the tokens as they are read."""
        return whole if self.order is None else as_read(whole, self.order, 1)


def lay_out_batch(
    mesh: ProcessMesh | DeviceMesh,
    plan: ParallelPlan,
    tokens: Tensor,
    targets: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    rows: int | None = None,
) -> Batch:
    """A batch on `mesh` as a model with that plan takes it: rows over the axes of data, and with plan.context tokens over "cp".

    tokens, targets, positions, documents: [B, T] of ints, plain, the same on every rank. rows: B, where the tensors are not
    all of it but this rank's own rows alone, as `Layout(mesh, {"dp": Shard(0)})` cuts them where "dp" is the axis of data.
    With context="all_gather" the tokens lie in `balanced_order`, so that causal attention is as much work on every rank, and
    the batch's positions, or its tokens where the model is given no positions, say so to the model. The loss does not ask for an order: it takes logits and batch.targets as they are.
    T need not be divisible: shards are cut as `torch.chunk` cuts, so the last ranks have fewer tokens, or none.
    Communication: none, but for the mesh's process groups where they are new.
    Raises ValueError for tensors of several shapes, and for others than this rank's rows.
    """
    mesh = as_process_mesh(mesh)
    others = {"targets": targets, "positions": positions, "documents": documents}
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != tokens.shape:
            raise ValueError(
                f"lay_out_batch: {name} are {tuple(tensor.shape)}, but the tokens are {tuple(tokens.shape)}"
            )
    if tokens.ndim != 2:
        raise ValueError(f"lay_out_batch takes tokens [B, T], got {tuple(tokens.shape)}")
    if mesh.size == 1:
        return Batch(tokens=tokens, targets=targets, positions=positions, documents=documents, order=None)
    B, T = (tokens.shape[0] if rows is None else rows), tokens.shape[1]
    cut = plan.context is not None and CONTEXT_AXIS in mesh.axis_names
    by_rows, by_tokens = _layouts(mesh, cut)
    ways = mesh.axis_size(CONTEXT_AXIS) if cut else 1
    order = balanced_order(T, ways) if plan.context == "all_gather" and ways > 1 else None
    if order is not None and positions is None:
        positions = torch.arange(T, device=tokens.device).expand(tokens.shape)

    own = by_rows.local_slices((B, T), this_rank())[0]
    if rows is not None and len(tokens) != own.stop - own.start:
        raise ValueError(
            f"lay_out_batch: of {rows} rows rank {this_rank()} has {own.start} to {own.stop}, as ({by_rows}) cuts them, but was "
            f"given {len(tokens)}; give those, or all rows without rows="
        )

    def laid(tensor: Tensor | None, layout: Layout) -> DTensor | None:
        if tensor is None:
            return None
        if this_rank() not in mesh:
            return wrap(tensor.new_empty(0), layout, (B, T))
        here = layout.local_slices((B, T), this_rank())
        tensor = tensor if order is None else as_laid(tensor, order, 1)
        tensor = tensor[here[0]] if rows is None else tensor
        return wrap(tensor[:, here[1]].contiguous(), layout, (B, T))

    placed, own_tokens = laid(positions, by_tokens), laid(tokens, by_tokens)
    assert own_tokens is not None, "they are given"
    return Batch(
        tokens=in_order(own_tokens, order),
        targets=laid(targets, by_tokens),
        positions=OrderedPositions(values=placed, order=order) if placed is not None and order is not None else placed,
        documents=laid(documents, by_rows),
        order=order,
    )


@lru_cache(maxsize=1024)  # a few meshes, asked for with every microbatch
def _layouts(mesh: ProcessMesh, cut: bool) -> tuple[Layout, Layout]:
    """The layouts of a batch's rows; and of its tokens, which may be cut over "cp"."""
    by_rows = Layout(mesh, {axis: Shard(0) for axis in mesh.axis_names if axis not in (CONTEXT_AXIS, TENSOR_AXIS)})
    return by_rows, by_rows.replace(**{CONTEXT_AXIS: Shard(1)}) if cut else by_rows


@lru_cache(maxsize=1024)
def balanced_order(tokens: int, parts: int) -> Runs:
    """The order in which a sequence is cut so that each of `parts` contiguous shards is as much causal work.

    A shard, as `torch.chunk` cuts, is a run from the sequence's head and one from its tail, as long or one shorter: early
    tokens, which see few keys, with late ones. It is a function of the two numbers alone.
    """
    runs: list[tuple[int, int]] = []
    head, tail = 0, tokens
    for part in range(parts):
        start, stop = chunk(tokens, parts, part)
        early = (stop - start + 1) // 2
        late = stop - start - early
        runs += [(head, head + early), (tail - late, tail)]
        head, tail = head + early, tail - late
    return tuple([run for run in runs if run[0] < run[1]])
