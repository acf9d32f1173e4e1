"""Lays batches out for a plan: rows over the data axes, tokens over "cp" in an order that balances causal work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.kernels.extension import Runs, as_laid, as_read
from weft.mesh import Layout, ProcessMesh, Shard
from weft.reshard.extension import as_process_mesh, this_rank, wrap

from ..exact import check_batch
from .packed.order import NO_WINDOW, order_by_documents
from .packed.rows import RowOrders
from .packed.transfer import prepare_exchanges
from .plan import ParallelPlan
from .styles import CONTEXT_AXIS, TENSOR_AXIS


class Ordered(NamedTuple):
    """The model's argument `documents` or `dropout_key`, together with the order in which the tokens are laid out.

    A pre-hook of the model (context.py) makes an Ordered, layers hand the argument on, and pre-hooks of attention and
    dropout unwrap it. The order is not kept on a module: a recomputed layer could find the order of a later batch.
    """

    order: Runs | RowOrders
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderedPositions:
    """Positions of tokens that are not laid out in reading order."""

    values: DTensor  # [B, T] of ints, laid out as the tokens
    # runs of consecutive tokens, [start, stop) of the sequence, in the order of the layout; a RowOrders for runs by row
    order: Runs | RowOrders


_ORDER = "_order_of_tokens"  # attribute of tokens that are not laid out in reading order


def order_of(tokens: Tensor) -> Runs | RowOrders | None:
    """The order of tokens from `lay_out_batch`; None for tokens in reading order."""
    order: Runs | RowOrders | None = getattr(tokens, _ORDER, None)
    return order


def in_order(tokens: DTensor, order: Runs | RowOrders | None) -> DTensor:
    """Attach the order of layout to `tokens`, and return `tokens`."""
    if order is not None:
        setattr(tokens, _ORDER, order)
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The arguments of a model and a loss, laid out for a plan. Made by `lay_out_batch`.

    Call `model(batch.tokens, positions=batch.positions, ...)`. The tokens carry their order: a model called without
    `positions=` finds the positions itself. A copy of the tokens has no order: a model called with the copy alone
    raises ValueError under context="all_gather".
    tokens, targets: [B, T]; plain tensors on a mesh of one process.
    positions, documents: None where the model needs none.
    numbers: [B, T], laid out as the targets; for `document_sums`. None where `lay_out_batch` got none.
    order: runs of consecutive tokens, [start, stop) of the sequence, in the order of the layout. Where rows are cut by
        documents, a `RowOrders`: runs for each row given to `lay_out_batch`. None for reading order.
    """

    tokens: Tensor
    targets: Tensor | None
    positions: Tensor | OrderedPositions | None
    documents: Tensor | None
    order: Runs | RowOrders | None
    numbers: Tensor | None = None

    def as_read(self, whole: Tensor) -> Tensor:
        """Bring a plain tensor [B, T, ...] of all tokens, as `to_global(logits)`, into reading order.

        Raises ValueError where rows are cut by documents and `lay_out_batch` got `rows=`.
        """
        if isinstance(self.order, RowOrders):
            return self.order.as_read(whole)
        return whole if self.order is None else as_read(whole, self.order, 1)


def lay_out_batch(
    mesh: ProcessMesh | DeviceMesh,
    plan: ParallelPlan,
    tokens: Tensor,
    targets: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    numbers: Tensor | None = None,
    rows: int | None = None,
) -> Batch:
    """Lay a batch out on `mesh` for a model with this plan: rows over the data axes, tokens over "cp" if the plan
    has context.

    tokens, targets, positions, documents, numbers: plain tensors [B, T] of ints.
    numbers: of a token's document, as `documents`, but laid out as the targets: for `document_sums`.
    rows: None if every rank gives the whole batch. Otherwise the number of rows of the whole batch, B, and the tensors
        hold this rank's rows only, as `Layout(mesh, {"dp": Shard(0)})` cuts B rows (if "dp" is the data axis).
    With context="all_gather", the order of tokens gives all ranks equal causal work under the plan's windows
    (`order_by_documents`). Documents on the CPU give each row an order of its own: attention then sends keys and values
    only to the ranks that see the keys, and the model needs `documents=batch.documents`. Without documents, and under a
    plan with `exact`, all rows have a common order, as for a single document.
    The order reaches the model with the batch's positions, or with the tokens if the model is called without
    positions. The loss needs no order: the logits and batch.targets are in the same order.
    T need not be divisible: shards are cut as by `torch.chunk`; the last ranks have fewer tokens, or none.
    Communication: none, apart from making the mesh's process groups.
    Raises ValueError for tensors of different shapes, for a wrong number of rows on this rank, for a document with
    tokens again after its end, and under a plan with `exact` for rows or tokens that a mesh within the named one would
    cut elsewhere.
    """
    mesh = as_process_mesh(mesh)
    companions = {"targets": targets, "positions": positions, "documents": documents, "numbers": numbers}
    for name, tensor in companions.items():
        if tensor is not None and tensor.shape != tokens.shape:
            raise ValueError(
                f"lay_out_batch: {name} are {tuple(tensor.shape)}, but the tokens are {tuple(tokens.shape)}"
            )
    if tokens.ndim != 2:
        raise ValueError(f"lay_out_batch takes tokens [B, T], got {tuple(tokens.shape)}")
    if documents is not None and (documents.is_floating_point() or documents.is_complex()):
        raise ValueError(f"lay_out_batch: documents are {documents.dtype}; give ints, the number of a token's document")
    if plan.exact is not None:
        check_batch(plan.exact, tokens.shape[0] if rows is None else rows, tokens.shape[1])
    if mesh.size == 1 and plan.exact is None:
        documents = None if documents is None else documents.to(tokens.device)
        numbers = None if numbers is None else numbers.to(tokens.device)
        return Batch(
            tokens=tokens, targets=targets, positions=positions, documents=documents, order=None, numbers=numbers
        )
    B, T = (tokens.shape[0] if rows is None else rows), tokens.shape[1]
    cut = plan.context is not None and CONTEXT_AXIS in mesh.axis_names
    by_rows, by_tokens = _layouts(mesh, cut)
    ways = mesh.axis_size(CONTEXT_AXIS) if cut else 1
    own = by_rows.local_slices((B, T), this_rank())[0]
    if rows is not None and len(tokens) != own.stop - own.start:
        raise ValueError(
            f"lay_out_batch: of {rows} rows rank {this_rank()} has {own.start} to {own.stop}, as ({by_rows}) cuts "
            f"them, but was given {len(tokens)} rows; give rows {own.start} to {own.stop}, or all rows without rows="
        )
    order: Runs | RowOrders | None = cut_rows(mesh, plan, documents)
    if order is None and plan.context == "all_gather" and ways > 1:
        order = order_by_documents((T,), ways, plan.windows or NO_WINDOW)
    if order is not None and positions is None:
        positions = torch.arange(T, device=tokens.device).expand(tokens.shape)
    own_order = order.rows(own.start, own.stop) if isinstance(order, RowOrders) and rows is None else order
    if isinstance(own_order, RowOrders) and not own_order.orders:
        own_order = order_by_documents((T,), ways)  # this rank has no rows

    def laid(tensor: Tensor | None, layout: Layout) -> DTensor | None:
        if tensor is None:
            return None
        tensor = tensor.to(tokens.device)
        if this_rank() not in mesh:
            return wrap(tensor.new_empty(0), layout, (B, T))
        here = layout.local_slices((B, T), this_rank())
        tensor = tensor[here[0]] if rows is None else tensor
        if isinstance(own_order, RowOrders):
            return wrap(tensor.gather(1, own_order.places(tensor.device)[:, here[1]]), layout, (B, T))
        tensor = tensor if own_order is None else as_laid(tensor, own_order, 1)
        return wrap(tensor[:, here[1]].contiguous(), layout, (B, T))

    placed, own_tokens = laid(positions, by_tokens), laid(tokens, by_tokens)
    assert own_tokens is not None, "tokens are not None"
    ordered = (
        None
        if placed is None or own_order is None
        else OrderedPositions(values=in_order(placed, own_order), order=own_order)
    )
    return Batch(
        tokens=in_order(own_tokens, own_order),
        targets=laid(targets, by_tokens),
        positions=placed if ordered is None else ordered,
        documents=laid(documents, by_rows),
        order=order,
        numbers=laid(numbers, by_tokens),
    )


def cut_rows(mesh: ProcessMesh, plan: ParallelPlan, documents: Tensor | None) -> RowOrders | None:
    """The orders of rows by documents that `lay_out_batch` will use; None where rows are not cut by documents.

    Raises ValueError for a document with tokens again after its end.
    """
    if documents is None or documents.device.type != "cpu" or not len(documents):
        return None
    if not cuts_by_documents(mesh, plan):
        return None
    return RowOrders.of(documents, mesh.axis_size(CONTEXT_AXIS), plan.windows or NO_WINDOW)


def cuts_by_documents(mesh: ProcessMesh, plan: ParallelPlan) -> bool:
    """Whether `lay_out_batch` gives rows with documents on the CPU an order by documents.

    Not under `exact`: an exact step computes rows separately for each coordinate of the named mesh, and an exchange by
    documents is for all rows of a rank together.
    """
    is_sharded = CONTEXT_AXIS in mesh.axis_names and mesh.axis_size(CONTEXT_AXIS) > 1
    return plan.context == "all_gather" and is_sharded and plan.exact is None


def prepare_rows(
    model: nn.Module,
    mesh: ProcessMesh,
    plan: ParallelPlan,
    documents: Tensor | None,
    device: torch.device,
    *,
    dtype: torch.dtype,
) -> None:
    """Cut rows by documents and plan all exchanges of keys, ahead of `lay_out_batch` with the same documents.

    The tensor `documents` keeps the results: give `lay_out_batch` the same object. The trainer's reading thread calls
    this function, to save the time in the step. dtype: of the queries.
    Communication: none, apart from making the mesh's process groups.
    """
    order = cut_rows(mesh, plan, documents)
    if order is not None:
        prepare_exchanges(model, mesh, order, device, dtype)


@lru_cache(maxsize=1024)  # few meshes, looked up with every microbatch
def _layouts(mesh: ProcessMesh, cut: bool) -> tuple[Layout, Layout]:
    """The layout of a batch by rows only; and the layout of the tokens, which if `cut` are also sharded over "cp"."""
    by_rows = Layout(mesh, {axis: Shard(0) for axis in mesh.axis_names if axis not in (CONTEXT_AXIS, TENSOR_AXIS)})
    return by_rows, by_rows.replace(**{CONTEXT_AXIS: Shard(1)}) if cut else by_rows
