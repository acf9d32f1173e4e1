"""Hooks of context parallelism by documents: which order a layer's tokens have, and its keys on their way."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from weft.reshard import layout_of
from weft.reshard.extension import is_compiling, this_rank

from ...layers import DotProductAttention
from .rows import RowOrders
from .transfer import KeysOnTheirWay


class LatestOrder:
    """The order by documents of the layer that is running; None for another order. Shared by the hooks of a model.

    The hook of `KeysAndValues`, which sees keys and values alone, reads it. Set again by every layer with attention
    from its own arguments, so it is right for a recomputed layer, too.
    """

    def __init__(self) -> None:
        self.order: RowOrders | None = None

    def set(self, order: object, *documents: object) -> None:
        """Called by the model. documents: the model's argument, if the order is one of documents.

        Raises ValueError for an order by documents without documents.
        """
        by_row = order if isinstance(order, RowOrders) else None
        if by_row is not None and documents == (None,):
            raise ValueError(
                "lay_out_batch cut the rows by their documents, but the model is called without documents; call the "
                "model with documents=batch.documents, or lay the batch out without documents"
            )
        if self.order is not by_row:  # torch.compile sees no change of state where there is none
            self.order = by_row

    def watch(self, model: nn.Module) -> None:
        """Register a pre-hook on each module within the model that contains attention."""
        for module in model.modules():
            inner = (each for each in module.modules() if each is not module)
            if module is not model and any(isinstance(each, DotProductAttention) for each in inner):
                module.register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling():
            return
        orders = (getattr(each, "order", None) for each in (*args, *kwargs.values()))
        self.set(next((each for each in orders if isinstance(each, RowOrders)), None))


def start_exchange(key: DTensor, value: DTensor, order: RowOrders, window: int | None) -> Any:
    """The keys and values on their way, in place of the keys, and None in place of the values. window: of attention."""
    if this_rank() not in layout_of(key).mesh:
        return key, value
    return KeysOnTheirWay(key, value, order, window), None


def take_received(arguments: dict[str, Any], window: int | None) -> bool:
    """Puts the keys on their way into attention's arguments, where its tokens are cut by documents.

    Returns whether they are. Raises ValueError in a graph of torch.compile, and where order and keys do not match.
    """
    order, key = arguments.get("order"), arguments["key"]
    if not isinstance(order, RowOrders):
        if isinstance(key, KeysOnTheirWay):
            raise ValueError(
                "attention got keys of a batch cut by documents, but no documents; hand the argument documents on from "
                "the layer to its attention"
            )
        return False
    if is_compiling():
        raise ValueError(
            "the rows are cut by their documents, which no graph of torch.compile can follow; give lay_out_batch "
            "compiled=True"
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
    raise ValueError(
        "attention got documents that its layer did not get; give the layer's forward the argument documents"
    )
