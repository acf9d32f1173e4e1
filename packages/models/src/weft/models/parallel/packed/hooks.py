"""Hooks of context parallelism by documents: find the order of a layer's tokens, and start the exchange of keys."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from weft.reshard import layout_of
from weft.reshard.extension import between_graphs, this_rank

from ...layers import DotProductAttention
from ..batch import Ordered
from .exchange import RowOrders
from .transfer import KeysOnTheirWay


class LatestOrder:
    """The `RowOrders` of the running layer, or None. Shared by the hooks of a model.

    The hook of `KeysAndValues` reads `order`, since keys and values alone do not tell the order. Each layer with
    attention sets `order` from the layer's own arguments, also when the layer is recomputed.
    """

    def __init__(self) -> None:
        self.order: RowOrders | None = None

    def set(self, order: object, *documents: object) -> None:
        """Set `order` before a call of the model or of a layer. An `order` that is no `RowOrders` sets None.

        documents: the model's argument `documents`, if known.
        Raises ValueError for a `RowOrders` where documents are None.
        """
        by_row = order if isinstance(order, RowOrders) else None
        if by_row is not None and documents == (None,):
            raise ValueError(
                "lay_out_batch cut the rows by their documents, but the model is called without documents; call the "
                "model with documents=batch.documents, or lay the batch out without documents"
            )
        if by_row is not None or self.order is not None:  # torch.compile counts a write of None over None as a change
            self.order = by_row

    def watch(self, model: nn.Module) -> None:
        """Register a pre-hook that sets `order` on each layer: each module within the model that contains attention."""
        for module in model.modules():
            inner = (each for each in module.modules() if each is not module)
            if module is not model and any(isinstance(each, DotProductAttention) for each in inner):
                module.register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        orders = [each.order for each in (*args, *kwargs.values()) if isinstance(each, Ordered)]
        self.set(next((each for each in orders if isinstance(each, RowOrders)), None))


def start_exchange(key: DTensor, value: DTensor, order: RowOrders, window: int | None) -> Any:
    """Start to exchange a layer's keys and values. Returns `KeysOnTheirWay` in place of the keys, None for the values.

    window: the attention's; None for attention without a window. A rank outside the mesh gets key and value back.
    Communication: as `KeysOnTheirWay`.
    """
    if this_rank() not in layout_of(key).mesh:
        return key, value
    return KeysOnTheirWay(key, value, order, window), None


def is_by_documents(arguments: dict[str, Any]) -> bool:
    """Whether the rows of attention's arguments, or the keys, are by documents: `take_received` then prepares them."""
    return isinstance(arguments.get("order"), RowOrders) or isinstance(arguments["key"], KeysOnTheirWay)


@between_graphs("keys go to ranks by the documents of the batch; compile the block without fullgraph")
def take_received(arguments: dict[str, Any], window: int | None) -> bool:
    """Turn attention's argument `key`, a `KeysOnTheirWay`, into `key`, `value` and `received`; in place.

    Called before attention. Where `order` is a `RowOrders` and `key` a plain DTensor, the exchange starts here.
    Returns whether there is an exchange: False on ranks outside the mesh.
    A compiled block calls this function between two graphs.
    Raises ValueError where only one of `order` and `key` is by documents.
    """
    order, key = arguments.get("order"), arguments["key"]
    if not isinstance(order, RowOrders):
        raise ValueError(
            "attention got keys of a batch cut by documents, but no documents; hand the argument documents on from the "
            "layer to its attention"
        )
    del arguments["order"]
    arguments["documents"] = None
    if isinstance(key, DTensor):
        key, _ = start_exchange(key, arguments["value"], order, window)
    if isinstance(key, KeysOnTheirWay):
        arguments["key"], arguments["value"] = key.take()
        arguments["received"] = key
        return True
    if isinstance(key, DTensor):
        return False  # this rank is outside the mesh
    raise ValueError("attention got documents, but its layer got none; give the layer's forward the argument documents")
