"""Lays batches out for a plan: rows over the data axes, tokens over "cp" in an order that balances causal work."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.kernels.extension import Runs, as_laid, as_read
from weft.mesh import Layout, ProcessMesh, Shard
from weft.reshard.extension import as_process_mesh, this_rank, wrap

from ..exact import check_batch
from .packed.exchange import RowOrders
from .packed.order import NO_WINDOW, order_by_documents
from .packed.transfer import prepare_exchanges
from .plan import ParallelPlan
from .styles import CONTEXT_AXIS, PIPELINE_AXIS, TENSOR_AXIS, TOKENS_DIM


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


_ORDER = "_order_of_tokens"  # attribute of a batch's tensors that are not laid out in reading order


def order_of(tokens: Tensor) -> Runs | RowOrders | None:
    """The order of the tokens of a batch's tensor from `lay_out_batch`; None for reading order, and for a copy."""
    order: Runs | RowOrders | None = getattr(tokens, _ORDER, None)
    return order


def check_one_batch(order: Any, another: Any, name: str) -> None:
    """Raises ValueError where a tensor is of another batch than the tokens: where the orders differ.

    order, another: the results of `order_of` for the tokens and for the tensor; None is not compared. name: of the
        tensor, for the error.
    """
    if order is None or another is None:
        return
    if not (order.is_same(another) if isinstance(order, RowOrders) else order == another):
        raise ValueError(
            f"the tokens and the {name} come from two calls of lay_out_batch, which cut the rows in two ways; give "
            f"tokens, positions, documents and targets of one batch"
        )


class ModelArguments:
    """Reads a model's tokens, and the order of the tokens, from the arguments of a call.

    The model's first argument are the tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(model.forward).parameters.values()
        # of the arguments that may be given by position
        self.names = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments by name."""
        return dict(zip(self.names, args, strict=False)) | dict(kwargs)

    def first_name(self, kwargs: Mapping[str, Any]) -> str:
        """The name of the tokens; for a forward of **kwargs alone, the first argument given."""
        return self.names[0] if self.names else next(iter(kwargs), "")

    def tokens(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The tokens; None for a call without tokens."""
        return args[0] if args else kwargs.get(self.first_name(kwargs))

    def order(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Runs | RowOrders | None:
        """The order in which the tokens are laid out; None for reading order.

        A copy of the tokens of a `Batch` has no order. The order is then the order of the batch's positions.
        """
        tokens, positions = self.tokens(args, kwargs), ordered_positions(self.by_name(args, kwargs).get("positions"))
        order = order_of(tokens) if isinstance(tokens, Tensor) else None
        return positions.order if order is None and isinstance(positions, OrderedPositions) else order


def ordered_positions(positions: Any) -> Any:
    """`OrderedPositions` for the values of a batch's positions, which carry the order; all else unchanged."""
    order = order_of(positions) if isinstance(positions, DTensor) else None
    return positions if order is None else OrderedPositions(values=positions, order=order)


def in_order(tokens: DTensor, order: Runs | RowOrders | None) -> DTensor:
    """Attach the order of layout to `tokens`, and return `tokens`. order: None for reading order, which is no order."""
    if order is not None:
        setattr(tokens, _ORDER, order)
    return tokens


def check_order(
    tokens: DTensor, order: Any, positions: Any, context: str | None, model: str = "the model", argument: str = ""
) -> None:
    """Raises ValueError unless tokens sharded over "cp" and their positions tell one order.

    order: of the tokens, from `order_of`. context: of the plan: only under "all_gather" must there be an order.
    model, argument: names of the model and of the tokens' argument, for errors.
    """
    if isinstance(positions, OrderedPositions):
        check_one_batch(order, positions.order, "positions")
    elif order is not None and positions is not None:
        raise ValueError(
            f"the tokens are in the order {order} of lay_out_batch, but the positions carry no order; give the "
            f"positions to lay_out_batch, and call {model} with positions=batch.positions"
        )
    elif order is None and positions is None and context == "all_gather":
        raise ValueError(
            f"{argument or 'the tokens'} of {model} are {tokens.placements}, and neither the tokens nor positions tell "
            f"their order (a copy of the tokens of lay_out_batch has none): call {model} with "
            f"positions=batch.positions of the same batch, or, for tokens in reading order, with their positions, laid "
            f"out as the tokens"
        )


def check_batch_order(tokens: Tensor, positions: Any, plan: ParallelPlan) -> None:
    """`check_order` of the arguments of a whole batch, before they are divided into microbatches."""
    if plan.context is None or not sharded_on_tokens(tokens):
        return
    check_order(tokens, order_of(tokens), ordered_positions(positions), plan.context)


def sharded_on_tokens(x: Any) -> TypeGuard[DTensor]:
    """Whether x is a DTensor with tokens sharded over "cp". Asked of torch's placements, since Dynamo cannot trace
    layouts.
    """
    if not isinstance(x, DTensor):
        return False
    names = x.device_mesh.mesh_dim_names or ()
    return any(
        name == CONTEXT_AXIS and each.is_shard(TOKENS_DIM) for name, each in zip(names, x.placements, strict=False)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The arguments of a model and a loss, laid out for a plan. Made by `lay_out_batch`.

    Call `model(batch.tokens, positions=batch.positions, ...)`. Each tensor carries the tokens' order: a model called
    without `positions=` finds the positions itself. A copy of the tokens has no order: a model called with the copy
    alone raises ValueError under context="all_gather".
    """

    tokens: Tensor  #: [B, T]; a plain tensor on a mesh of one process
    targets: Tensor | None  #: [B, T], as `tokens`. None where `lay_out_batch` got none.
    positions: Tensor | OrderedPositions | None  #: [B, T], as `tokens`. None where the model needs none.
    documents: Tensor | None  #: [B, T], as `tokens`. None where the model needs none.
    #: runs of consecutive tokens, [start, stop) of the sequence, in the order of the layout. Where rows are cut by
    #: documents, a `RowOrders`: runs for each row given to `lay_out_batch`. None for reading order.
    order: Runs | RowOrders | None
    #: [B, T], laid out as the targets; for `document_sums`. None where `lay_out_batch` got none.
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
    has context. The stages of "pp" have the same rows.

    tokens, targets, positions, documents, numbers: plain tensors [B, T] of ints. None: the batch has none, except
        that positions are counted from 0 where the layout changes the order of tokens.
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
            return in_order(wrap(tensor.new_empty(0), layout, (B, T)), own_order)
        here = layout.local_slices((B, T), this_rank())
        tensor = tensor[here[0]] if rows is None else tensor
        if isinstance(own_order, RowOrders):
            local = tensor.gather(1, own_order.places(tensor.device)[:, here[1]])
        else:
            tensor = tensor if own_order is None else as_laid(tensor, own_order, 1)
            local = tensor[:, here[1]].contiguous()
        return in_order(wrap(local, layout, (B, T)), own_order)

    own_tokens = laid(tokens, by_tokens)
    assert own_tokens is not None, "tokens are not None"
    return Batch(
        tokens=own_tokens,
        targets=laid(targets, by_tokens),
        positions=ordered_positions(laid(positions, by_tokens)),
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
    this function, to save the time in the step. documents: None: nothing is done. dtype: of the queries.
    Communication: none, apart from making the mesh's process groups.
    """
    order = cut_rows(mesh, plan, documents)
    if order is not None:
        prepare_exchanges(model, mesh, order, device, dtype)


@lru_cache(maxsize=1024)  # few meshes, looked up with every microbatch
def _layouts(mesh: ProcessMesh, cut: bool) -> tuple[Layout, Layout]:
    """The layout of a batch by rows only; and the layout of the tokens, which if `cut` are also sharded over "cp".

    All stages of a pipeline have the same rows.
    """
    without_rows = (CONTEXT_AXIS, TENSOR_AXIS, PIPELINE_AXIS)
    by_rows = Layout(mesh, {axis: Shard(0) for axis in mesh.axis_names if axis not in without_rows})
    return by_rows, by_rows.replace(**{CONTEXT_AXIS: Shard(1)}) if cut else by_rows
