"""Context parallelism: hooks that let attention see the tokens of all ranks, where tokens are sharded over "cp"."""

from __future__ import annotations

import inspect
import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels.extension import Runs, as_laid, cast_for, pack, unpack
from weft.mesh import Layout, ProcessMesh, Shard
from weft.reshard import layout_of, reshard, start_reshard
from weft.reshard.extension import (
    StartedReshard,
    begin_in_graph,
    finish_in_graph,
    in_graph,
    is_compiling,
    named_size,
    shape_of,
    this_rank,
    wrap,
)

from ..checks import check_head_degrees
from ..layers import DotProductAttention, Dropout
from .batch import (
    ModelArguments,
    Ordered,
    OrderedPositions,
    check_one_batch,
    check_order,
    order_of,
    ordered_positions,
    sharded_on_tokens,
)
from .packed.exchange import RowOrders
from .packed.hooks import LatestOrder, is_by_documents, start_exchange, take_received
from .plan import ParallelPlan
from .styles import CONTEXT_AXIS, TENSOR_AXIS, TOKENS_DIM

HEADS_DIM = 2
ATTENTION_ARGUMENTS = ("query", "key", "value", "dropout_key", "documents", "cache")


def has_context_axis(mesh: ProcessMesh) -> bool:
    """Whether the mesh has a context axis of two or more ranks. For `check_context`, `hook_context`, `divide_batch`."""
    return CONTEXT_AXIS in mesh.axis_names and mesh.axis_size(CONTEXT_AXIS) > 1


def check_context(model: nn.Module, mesh: ProcessMesh, plan: ParallelPlan) -> None:
    """Check the model against the plan's context parallelism on this mesh.

    Called by `parallelize` before the model is changed. No check without `plan.context`, or without a context axis.
    Raises ValueError for a model without attention modules, and under "ulysses" for heads not divisible over tp and cp.
    """
    if plan.context is None or not has_context_axis(mesh):
        return
    own = dict(model.named_modules())
    attentions = [name for name, module in own.items() if isinstance(module, DotProductAttention)]
    if not attentions:
        raise ValueError(
            f"the plan has context={plan.context!r}, but {type(model).__name__} has no DotProductAttention of "
            f"weft.models.layers, the module to which context applies; attend by DotProductAttention, or use "
            f"context=None"
        )
    if plan.context == "ulysses":
        for parent in (name.rpartition(".")[0] for name in attentions):
            layers: Any = [(f"{parent}.{child}".lstrip("."), layer) for child, layer in own[parent].named_children()]
            heads = {name: layer.out_features // layer.unit for name, layer in layers if getattr(layer, "unit", 1) > 1}
            check_heads(heads, mesh)


def check_heads(heads: dict[str, int], mesh: ProcessMesh) -> None:
    """Raises ValueError where heads cannot be cut over tp and cp.

    Called by `check_context` before the model is changed, and by `_to_heads` in each call of attention.
    heads: the global number of heads, by the name of a projection, or of attention's argument.
    """
    if heads:
        tp = named_size(mesh, TENSOR_AXIS) if TENSOR_AXIS in mesh.axis_names else 1
        check_head_degrees(heads, cp=mesh.axis_size(CONTEXT_AXIS), tp=tp)


def hook_context(model: nn.Module, mesh: ProcessMesh, plan: ParallelPlan, name: str = "") -> None:
    """Register the hooks of context parallelism: on the model, and on the modules of attention and dropout.

    Called by `parallelize` for each part of the model whose plan decides about context. With context=None, the hook of
    the model alone is registered, and raises for tokens sharded over "cp". Without a context axis: no hooks.
    name: of the model within a larger model whose plan gives this part a plan of its own.
    Communication: none here; in a call as `_start_gather`, or `_to_heads` and `_to_tokens`.
    """
    own = list(model.modules())
    if not has_context_axis(mesh) or not any(isinstance(module, DotProductAttention) for module in own):
        return
    latest = LatestOrder()
    model.register_forward_pre_hook(_ModelHook(model, plan, latest, name).enter, with_kwargs=True)
    if plan.context is None:
        return
    for module in own:
        if isinstance(module, Dropout):
            module.register_forward_pre_hook(_drop_in_order, with_kwargs=True)
        elif isinstance(module, DotProductAttention):
            if plan.context == "all_gather":
                module.keys_and_values.register_forward_hook(partial(_start_gather, latest, module))
                module.register_forward_pre_hook(_gather_keys, with_kwargs=True)
            else:
                module.register_forward_pre_hook(_enter_heads, with_kwargs=True)
                module.register_forward_hook(_leave_heads)
    if plan.context == "all_gather":
        latest.watch(model)


class _ModelHook:
    """The pre-hook of the model: gathers the documents of all tokens, and adds positions and the tokens' order.

    Made by `hook_context`, once for a model.
    latest: gets the order of the tokens at each call, for `_start_gather`. name: as for `hook_context`.
    """

    def __init__(self, model: nn.Module, plan: ParallelPlan, latest: LatestOrder, name: str) -> None:
        kind = type(model).__name__
        self._model_name = f"{name} ({kind})" if name else kind
        self._arguments = ModelArguments(model)
        parameters = inspect.signature(model.forward).parameters.values()
        takes = {each.name for each in parameters}
        any_name = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self._takes_positions, self._takes_documents = (
            any_name or name in takes for name in ("positions", "documents")
        )
        self._context, self._latest = plan.context, latest

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called before each forward of the model; returns the changed (args, kwargs).

        Returns None, for unchanged arguments, where the tokens are not sharded over "cp".
        For tokens not in reading order, documents and dropout_key become `Ordered`.
        Communication: as `_whole_tokens`, with documents.
        Raises ValueError for sharded tokens under context=None, for tokens not in reading order where forward takes no
        documents, and as `check_order` and `check_one_batch`.
        """
        arguments, tokens = self._arguments.by_name(args, kwargs), self._arguments.tokens(args, kwargs)
        self._latest.set(None)
        if not sharded_on_tokens(tokens):
            return None
        if self._context is None:
            raise ValueError(  # Dynamo can trace neither a LayoutError nor layout_of
                f"the tokens are {tokens.placements}, but the plan has context=None, with which no rank sees the "
                f'tokens of another; give the plan context="all_gather" or "ulysses", or replicate the tokens over '
                f"{CONTEXT_AXIS!r}"
            )
        positions, documents = ordered_positions(arguments.get("positions")), arguments.get("documents")
        order = self._arguments.order(args, kwargs)
        if isinstance(documents, DTensor):
            check_one_batch(order, order_of(documents), "documents")
            arguments["documents"] = _whole_tokens(documents)
        first = self._arguments.first_name(kwargs)
        check_order(tokens, order, positions, self._context, self._model_name, first)
        if order is not None and not isinstance(positions, OrderedPositions):
            own = _positions_by_row(tokens, order) if isinstance(order, RowOrders) else _own_positions(tokens, order)
            positions = OrderedPositions(values=own, order=order)
        if isinstance(positions, OrderedPositions):
            if not self._takes_documents:
                raise ValueError(
                    f"the order of the tokens reaches attention with the argument documents, which "
                    f"{self._model_name}.forward does not take; add documents=None to forward and hand it on to "
                    f"the layers, or lay tokens and positions out in reading order, by distribute()"
                )
            self._latest.set(positions.order, arguments.get("documents"))
            arguments.pop("positions", None)
            if self._takes_positions:
                arguments["positions"] = positions.values
            arguments["documents"] = Ordered(positions.order, arguments.get("documents"))
            if arguments.get("dropout_key") is not None:
                arguments["dropout_key"] = Ordered(positions.order, arguments["dropout_key"])
        elif positions is None and self._takes_positions:
            arguments["positions"] = _own_positions(tokens)
        elif not self._takes_positions:
            arguments.pop("positions", None)
        positional = self._arguments.names[: len(args)]
        return (*(arguments.pop(name) for name in positional), *args[len(positional) :]), arguments


@in_graph
def _own_positions(tokens: DTensor, order: Runs | None = None) -> DTensor:
    """The position in the row of each token of this rank, laid out as `tokens`. order: of all rows."""
    layout, local = layout_of(tokens), tokens.to_local()
    shape = shape_of(tokens)
    here = layout.local_slices(shape, this_rank())[TOKENS_DIM]
    places = torch.arange(shape[TOKENS_DIM], device=local.device)
    places = (places if order is None else as_laid(places, order, 0))[here]
    return wrap(places.expand(local.shape).contiguous() if local.ndim > 1 else local.clone(), layout, shape)


def _positions_by_row(tokens: DTensor, order: RowOrders) -> DTensor:
    """`_own_positions` for rows with an order each."""
    layout, shape = layout_of(tokens), shape_of(tokens)
    here = layout.local_slices(shape, this_rank())[TOKENS_DIM]
    return wrap(order.places(tokens.to_local().device)[:, here].contiguous(), layout, shape)


def _drop_in_order(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of a Dropout: splits an `Ordered` key into the arguments key and order."""
    arguments = dict(zip(("input", "key"), args, strict=False)) | kwargs
    key = arguments["key"]
    if not isinstance(key, Ordered):
        return None
    name, order = ("orders", key.order.orders) if isinstance(key.order, RowOrders) else ("order", key.order)
    return (), {**arguments, "key": key.value, name: order}


def _attention_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Attention's arguments by name, with the order of the tokens as a separate argument."""
    arguments = dict(zip(ATTENTION_ARGUMENTS, args, strict=False)) | kwargs
    for name in ("documents", "dropout_key"):
        argument = arguments.get(name)
        if isinstance(argument, Ordered):
            arguments["order"], arguments[name] = argument
    return arguments


class _Gathering(NamedTuple):
    """Keys and values whose all-gather is under way. Made by `_start_gather`, and given to attention as `key`."""

    packed: StartedReshard  # of the keys and values in a single tensor, from `_packed`
    widths: tuple[int, ...]  # from `_packed`: of a part of the keys, and of a part of the values

    def wait(self) -> tuple[Tensor, ...]:
        """The keys and the values of all tokens, when the all-gather is done. Called by `_gather_keys`."""
        return unpack(self.packed.wait(), self.widths)


class _GatheringInGraph(NamedTuple):
    """`_Gathering` in a graph traced by torch.compile. Made by `_start_gather`, read by `_gather_keys`."""

    packed: Tensor  # this rank's keys and values in a single tensor
    number: Tensor  # from `begin_in_graph`: names the started all-gather
    unfilled: Tensor  # from `begin_in_graph`: uninitialized, of the local shape after the all-gather


def _start_gather(
    latest: LatestOrder, attend: DotProductAttention, module: nn.Module, args: Any, output: tuple[Tensor, Tensor]
) -> Any:
    """Hook of KeysAndValues: starts to gather the keys and values of all tokens; by documents, `start_exchange`.

    Communication: an all-gather, started and not waited for; in backward a reduce-scatter, waited for. With an order by
    documents, as `KeysOnTheirWay`.
    """
    if not sharded_on_tokens(output[0]):
        return None
    key, value = _cast(*output)
    assert isinstance(key, DTensor) and isinstance(value, DTensor), "values lie as keys"
    if latest.order is not None:  # a compiled block starts the exchange where attention is called, after the graph
        return None if is_compiling() else start_exchange(key, value, latest.order, attend.window)
    if is_compiling():
        return _GatheringInGraph(*_begin_gather(key, value)), None
    layout = layout_of(key)
    packed, widths = _packed((key, value), _num_parts(layout))
    return _Gathering(start_reshard(packed, placements=_replaced(layout, "R")), widths), None


def _gather_keys(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of attention under "all_gather": waits for the keys and values of all tokens. By documents, attention
    gets the exchange under way.
    """
    arguments = _attention_arguments(args, kwargs)
    if is_by_documents(arguments) and take_received(arguments, module.window):
        return (), arguments
    if isinstance(arguments["key"], _Gathering):
        arguments["key"], arguments["value"] = arguments["key"].wait()
    elif isinstance(arguments["key"], _GatheringInGraph):
        arguments["key"], arguments["value"] = _finish_gather(*arguments["key"])
    elif isinstance(arguments["query"], DTensor):
        arguments["key"], arguments["value"] = _gathered(*_cast(arguments["key"], arguments["value"]))
    return (), arguments


def _enter_heads(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of attention under "ulysses": gives attention all tokens of some heads."""
    arguments = _attention_arguments(args, kwargs)
    if isinstance(arguments["query"], DTensor):
        query, key, value = _cast(arguments["query"], arguments["key"], arguments["value"])
        arguments["query"], arguments["key"], arguments["value"] = _to_heads(query, key, value, module.head_dim)
    return (), arguments


def _cast(*tensors: Tensor) -> tuple[Any, ...]:
    """Queries, keys and values, cast under autocast to attention's dtype before being moved. Gradients move in this
    dtype, too.
    """
    return tuple([cast_for("attention", x) for x in tensors])


def _leave_heads(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Hook of attention under "ulysses": reshards the output from heads back to tokens."""
    return _to_tokens(output) if isinstance(output, DTensor) else output


@in_graph
def _whole_tokens(documents: DTensor) -> DTensor:
    """Documents [B, T] of all tokens. Communication: an all-gather, where the documents are sharded over "cp"."""
    return reshard(documents, placements=_replaced(layout_of(documents), "R"))


@in_graph
def _gathered(key: DTensor, value: DTensor) -> tuple[Tensor, ...]:
    """The keys and values of all tokens. Communication: an all-gather; in backward a reduce-scatter."""
    layout = layout_of(key)
    if layout[CONTEXT_AXIS] != Shard(TOKENS_DIM):
        return key, value
    return _reshard_packed((key, value), _num_parts(layout), _replaced(layout, "R"))


@in_graph
def _begin_gather(key: DTensor, value: DTensor) -> tuple[Tensor, ...]:
    """Begin the all-gather of keys and values. Backward ends the reduce-scatter of their gradients.

    Returns the keys and values as one packed tensor, then the two tensors of `begin_in_graph`.
    """
    layout = layout_of(key)
    packed, _ = _packed((key, value), _num_parts(layout))
    return packed, *begin_in_graph(packed, _replaced(layout_of(packed), "R"))


@in_graph
def _finish_gather(packed: Tensor, number: Tensor, unfilled: Tensor) -> tuple[Tensor, ...]:
    """Wait for the keys and values of all tokens. Backward begins the reduce-scatter of their gradients."""
    assert isinstance(packed, DTensor), "packed from DTensors"
    whole = finish_in_graph(number, unfilled, packed, _replaced(layout_of(packed), "R"))
    return unpack(whole, (int(packed.shape[-1]) // 2,) * 2)


@in_graph
def _to_heads(query: DTensor, key: DTensor, value: DTensor, head_dim: int) -> tuple[Tensor, ...]:
    """All tokens of some heads, from some tokens of all heads. Communication: an all-to-all; in backward a second.

    Raises ValueError where the heads cannot be cut over tp and cp.
    """
    layout = layout_of(query)
    if layout[CONTEXT_AXIS] != Shard(TOKENS_DIM):
        return query, key, value
    heads = {name: int(x.shape[HEADS_DIM]) // head_dim for name, x in (("query", query), ("key", key))}
    check_heads(heads, layout.mesh)
    target = _replaced(layout, f"S({HEADS_DIM})")
    return _reshard_packed((query, key, value), _num_parts(target), target)


@in_graph
def _to_tokens(output: DTensor) -> DTensor:
    """The attention's output, resharded from heads back to tokens. Communication: an all-to-all; in backward a
    second.
    """
    layout = layout_of(output)
    if layout[CONTEXT_AXIS] != Shard(HEADS_DIM):
        return output
    return reshard(output, placements=_replaced(layout, f"S({TOKENS_DIM})"))


def _reshard_packed(tensors: tuple[DTensor, ...], parts: int, target: Layout) -> tuple[Tensor, ...]:
    """Reshard tensors of equal layout, packed into a single tensor, by a single collective.

    parts: the number of shards of the heads in the target; each shard packs its slice of every tensor.
    """
    packed, widths = _packed(tensors, parts)
    return unpack(reshard(packed, placements=target), widths)


def _num_parts(layout: Layout) -> int:
    """The number of shards of the heads; inside `exact_sums`, on the named mesh."""
    mesh = layout.mesh
    return math.prod([named_size(mesh, axis) for axis in mesh.axis_names if layout[axis] == Shard(HEADS_DIM)])


def _packed(tensors: tuple[DTensor, ...], parts: int) -> tuple[DTensor, tuple[int, ...]]:
    """The tensors packed into a single tensor, and the width of each tensor's slice in one of the `parts`."""
    packed = pack(*tensors, parts=parts)
    assert isinstance(packed, DTensor), "packed from DTensors"
    return packed, tuple([int(x.shape[HEADS_DIM]) // parts for x in tensors])


@lru_cache(maxsize=1024)
def _replaced(layout: Layout, placement: str) -> Layout:
    return layout.replace(**{CONTEXT_AXIS: placement})
